# ds2 on NVIDIA GPUs: the host needs a driver for CUDA 13 and the NVIDIA container toolkit. In a checkout:
#     docker build -f docker/cuda.Dockerfile -t ds2:cuda .
#     docker run --init --rm --gpus all --ipc=host -v "$PWD:/work" ds2:cuda train recipe=an4
#     docker run --init --rm --gpus all --ipc=host -v "$PWD:/work" --entrypoint torchrun ds2:cuda --nproc-per-node 4 -m ds2.cli train recipe=librispeech
FROM python:3.12-slim
# CUDA's libraries and compiler are Python packages; Triton builds its launchers with gcc.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
WORKDIR /opt/ds2
COPY pyproject.toml constraints.txt README.md LICENSE ./
# PyTorch is a layer of its own, which changes of the sources leave as it is.
RUN pip install -c constraints.txt torch
COPY conf conf
COPY ds2 ds2
COPY ops ops
RUN pip install -c constraints.txt -e '.[gpu,mpi,decode,serve]'
WORKDIR /work
ENTRYPOINT ["ds2"]
CMD ["--help"]
