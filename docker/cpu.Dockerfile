# ds2 on CPUs. In a checkout:
#     docker build -f docker/cpu.Dockerfile -t ds2:cpu .
#     docker run --init --rm -v "$PWD:/work" ds2:cpu train recipe=synthetic
#     docker run --init --rm -v "$PWD:/work" -p 2700:2700 ds2:cpu serve runs/synthetic --host 0.0.0.0
FROM python:3.12-slim
ENV PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /opt/ds2
COPY pyproject.toml constraints.txt README.md LICENSE ./
# PyTorch is a layer of its own, which changes of the sources leave as it is.
RUN pip install -c constraints.txt torch --index-url https://download.pytorch.org/whl/cpu
COPY conf conf
COPY ds2 ds2
COPY ops ops
RUN pip install -c constraints.txt -e '.[decode,serve]'
WORKDIR /work
ENTRYPOINT ["ds2"]
CMD ["--help"]
