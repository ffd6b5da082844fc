"""Classifiers: from the output of a module to logits, for the last module and, in training, for those with a head."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from ds2.config.schema import ModelConfig
from ds2.model.norm import Count, Norm, make_norm
from ds2.model.pass_context import OWN_PARAMETERS, PassContext


class Classifier(Protocol):
    """Anything with a norm, or none, before a classifier."""

    norm: Norm | None
    classifier: nn.Linear


class Head(nn.Module):
    """Norm and a classifier behind a module that is not the last, for training (Lee and Watanabe 2021)."""

    def __init__(self, width: int, labels: int, config: ModelConfig) -> None:
        super().__init__()
        self.norm = make_norm(width, config)
        self.classifier = nn.Linear(width, labels)


def classified(x: Tensor, count: Count | None, head: Classifier, context: PassContext = OWN_PARAMETERS) -> Tensor:
    """(T, B, H) to logits (T, B, V) by the norm and the classifier of a head or of the whole model."""
    with torch.autocast(x.device.type, enabled=False):
        classifier = head.classifier
        x = x.to(classifier.weight.dtype)
        if head.norm is not None:
            x = head.norm(x, count, context)
        return functional.linear(x, context.weight(classifier.weight), context.weight(classifier.bias))
