"""`ds2 doctor`: which kernels run and why not, the calibrated ones shown and forgotten."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ds2_ops import convolution
from ds2_ops.jit import runtime
from ds2_ops.recurrent import calibrate, layer
from ds2_ops.recurrent.backends import persistent
from ds2_ops.recurrent.plan.devices import DEVICES
from ds2_ops.recurrent.plan.problem import DeviceFacts
from torch._subclasses.fake_tensor import FakeTensorMode

from ds2.commands import doctor

PROBLEM = "relu bfloat16 H 1152 B 4 forward on 132 SMs"


def test_calibrated_kernels_are_shown_and_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DS2_OPS_CACHE_DIR", str(tmp_path))
    choice = {"most": 5, "name": "cluster16 w36 b64 1x1", "us": {"cluster16 w36 b64 1x1": 0.75}}
    factors = {"portable": {"exchange": 1.25, "reads": 1.0}, "units": {"products": 0.5}}
    about = {"gpu": "NVIDIA H200", "driver": "13.0", "sources": "older"}
    record = {**about, "choices": {PROBLEM: choice}, "factors": factors}
    (tmp_path / "tiles-0123.json").write_text(json.dumps(record))
    (tmp_path / "tiles-4567.json").write_text("{")
    doctor.run([])
    text = capsys.readouterr().out
    assert "calibrated kernels: NVIDIA H200, CUDA 13.0, of other sources (tiles-0123.json)" in text
    assert "relative to the recorded ones: portable exchange 1.25, reads 1.00; units products 0.50\n" in text
    assert f"  {PROBLEM}: cluster16 w36 b64 1x1, 0.75 us per step, fastest of 5" in text
    doctor.run(["--forget-tiles"])
    assert f"2 records removed from {tmp_path}" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_root_learns_what_open_mpi_needs(tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path)}
    assert doctor.mpirun_facts(0, environment) == "not on PATH; torchrun needs none"
    for name in ("mpirun", "ompi_info"):
        (tmp_path / name).touch(mode=0o755)
    mpirun = str(tmp_path / "mpirun")
    assert doctor.mpirun_facts(1000, environment) == mpirun
    refusal = doctor.mpirun_facts(0, environment)
    assert refusal.startswith(f"{mpirun}; Open MPI refuses to start it as root unless OMPI_ALLOW_RUN_AS_ROOT and ")
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    assert doctor.mpirun_facts(0, environment | allowed) == mpirun
    (tmp_path / "ompi_info").unlink()  # another MPI
    assert doctor.mpirun_facts(0, environment) == mpirun


def test_each_gpu_says_what_runs_the_recurrence_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def text_of(facts: DeviceFacts, factors: dict[str, dict[str, float]] | None = None) -> str:
        monkeypatch.setattr(doctor.calibrate, "device_facts", lambda index: facts)
        monkeypatch.setattr(doctor.calibrate, "saved_factors", lambda index: factors or {})
        return doctor.recurrence_facts(0)

    assert text_of(DEVICES["H200"]).startswith("kernels of clusters, in bfloat16 up to 4224 hidden units, LSTM 1584")
    assert text_of(DEVICES["A100"]).startswith("portable kernels, in bfloat16 up to 3")
    assert text_of(replace(DEVICES["H200"], name="NVIDIA H200")).endswith("; chosen by times measured on an H200")
    assert text_of(DEVICES["A100"]).endswith(
        "; chosen by times measured on an H100, for this clock 1.40 x as long; fitted to this GPU at first use, see "
        "DS2_OPS_CALIBRATE"
    )
    assert text_of(DEVICES["A100"], {"units": {"reads": 1.5}}).endswith("1.40 x as long, and fitted to this GPU")
    turing = replace(DEVICES["A100"], name="T4", capability=(7, 5))
    assert text_of(turing) == (
        "matrix products and cuDNN, as T4 has compute capability 7.5; the persistent kernels need 8.0 or later: use "
        "backend='gemm'"
    )

    def refuse(index: int) -> DeviceFacts:
        raise RuntimeError("the driver cannot load a kernel built for sm_86: CUDA_ERROR_UNSUPPORTED_PTX_VERSION")

    monkeypatch.setattr(doctor.calibrate, "device_facts", refuse)
    assert "cannot load a kernel built for sm_86" in doctor.recurrence_facts(0)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_each_kernel_says_why_another_path_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def reasons(facts: DeviceFacts, refusal: str | None = None) -> dict[str, str | None]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: facts.capability)
        monkeypatch.setattr(runtime, "smem_bytes_per_block", lambda index: facts.smem_bytes_per_block)
        monkeypatch.setattr(doctor.calibrate, "device_facts", lambda index: facts)
        for module in (runtime, convolution, layer):
            monkeypatch.setattr(module, "capability", lambda index: facts.capability)
            monkeypatch.setattr(module, "why_no_kernel", lambda index: refusal)
        with FakeTensorMode():  # tensors of a GPU that is not there
            answers = doctor.why_no_kernels(torch.device("cuda", 0))
        persistent.why_not.cache_clear()
        calibrate.choose_tile.cache_clear()
        del answers["row convolution"]  # Triton may not be installed
        return answers

    persistent.why_not.cache_clear()
    calibrate.choose_tile.cache_clear()
    assert not any(reasons(DEVICES["H200"]).values())
    ampere = {name: reason for name, reason in reasons(DEVICES["A100"]).items() if reason}
    assert list(ampere) == [
        *("first convolution", "later convolutions", "spectrum in streams", "projection in streams"),
        *("row convolution in streams", "layers side by side in streams", "classifier in streams"),
    ]
    assert all("Hopper" in str(reason) or "whole chip" in str(reason) for reason in ampere.values())
    refused = reasons(DEVICES["H200"], "the driver is too old")
    del refused["layers side by side in streams"]  # the recurrence asks for itself
    assert set(refused.values()) == {"the driver is too old"}
