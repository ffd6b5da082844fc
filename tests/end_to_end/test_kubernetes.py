"""The Kubernetes manifest: every key and type by the models of Kubeflow Trainer's API, and a command that ds2 takes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

import ds2
from ds2.commands.compose import compose_config

FOLDER = Path(str(ds2.__file__)).parents[1] / "recipes" / "kubernetes"
KINDS = ("TrainingRuntime", "TrainJob")


def manifest() -> dict[str, dict[str, Any]]:
    documents = yaml.safe_load_all((FOLDER / "trainjob.yaml").read_text())
    return {document["kind"]: document for document in documents}


def check(document: dict[str, Any]) -> None:
    """Raise where a value has the wrong type, is missing, or stands under a key that the API does not know."""
    from kubeflow_trainer_api import models  # imported late: it takes a second

    model = getattr(models, f"TrainerV1alpha1{document['kind']}").from_dict(document)
    assert model is not None and model.to_dict() == document  # the models drop what they do not know
    assert document["apiVersion"] == "trainer.kubeflow.org/v1alpha1"


def pod(documents: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (node,) = documents["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    spec: dict[str, Any] = node["template"]["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("kind", KINDS)
def test_the_manifest_is_what_the_api_takes(kind: str) -> None:
    check(manifest()[kind])


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [("TrainJob", "numProcPerNode", "4"), ("TrainJob", "numProcsPerNode", 4), ("TrainJob", "args", [1])],
)
def test_a_wrong_type_or_key_would_be_found(kind: str, key: str, value: object) -> None:
    document = copy.deepcopy(manifest()[kind])
    document["spec"]["trainer"][key] = value
    with pytest.raises((ValueError, AssertionError)):
        check(document)


def test_the_parts_of_the_manifest_fit_each_other() -> None:
    documents = manifest()
    runtime, job = documents["TrainingRuntime"], documents["TrainJob"]
    assert job["spec"]["runtimeRef"] == {"kind": "TrainingRuntime", "name": runtime["metadata"]["name"]}
    (container,) = pod(documents)["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in pod(documents)["volumes"]}


def test_the_command_is_one_that_ds2_takes() -> None:
    documents = manifest()
    trainer = documents["TrainJob"]["spec"]["trainer"]
    assert trainer["command"] == ["torchrun", "-m", "ds2.cli"] and trainer["args"][0] == "train"
    config = compose_config(trainer["args"][1:])
    places = {mount["mountPath"] for mount in pod(documents)["containers"][0]["volumeMounts"]}
    assert {"/corpora", "/runs"} <= places
    assert config.run_dir.startswith("/runs/") and str(config.data.corpus).startswith("/corpora/")
    gpus = int(trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"])
    assert gpus == trainer["numProcPerNode"]
