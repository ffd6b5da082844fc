"""The operations of an exported network as an ONNX graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from ds2.export.operations import Step, Value

OPSET = 17
"""That of ONNX 1.12 (2022): what runtimes on phones read."""
_IR_VERSION = 8
_TO_THE_END = np.iinfo(np.int64).max


def _method(kind: str) -> Callable[..., OnnxValue]:
    """A method that adds a node of a kind; its arguments are the further inputs."""

    def method(self: OnnxValue, *inputs: Any) -> OnnxValue:
        return self.graph.node(kind, self, *inputs)

    return method


class OnnxValue:
    """A tensor of the graph with some operators and methods of torch's tensors, which add nodes."""

    dtype = torch.float32  # but for counts and conditions
    shape: Sequence[int]  # after `reshape`, and of the states of a step: (0, H), 0 for any number

    def __init__(self, graph: OnnxOperations, name: str) -> None:
        self.graph, self.name = graph, name

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any, options: Any = None) -> Any:
        """A function of torch, such as `torch.relu_`, is the method of its name."""
        return getattr(arguments[0], function.__name__)(*arguments[1:], **(options or {}))

    __add__, __sub__, __mul__, __floordiv__ = map(_method, ("Add", "Sub", "Mul", "Div"))
    __ge__, __lt__, __and__ = map(_method, ("GreaterOrEqual", "Less", "And"))
    __matmul__, log, sigmoid, tanh = map(_method, ("MatMul", "Log", "Sigmoid", "Tanh"))
    tanh_ = tanh

    def __getitem__(self, rows_and_columns: tuple[slice, slice]) -> Any:
        """All rows of (B, D), some columns."""
        _, columns = rows_and_columns
        return self.graph.slice(self, 1, columns.start or 0, columns.stop)

    def addcmul(self, x: OnnxValue, y: OnnxValue) -> OnnxValue:
        return self + x * y

    def addmm(self, x: OnnxValue, y: OnnxValue) -> OnnxValue:
        return self + x @ y

    def lerp(self, end: OnnxValue, weight: OnnxValue) -> OnnxValue:
        return self + weight * (end - self)

    def to(self, dtype: torch.dtype) -> OnnxValue:
        return self

    def relu_(self) -> OnnxValue:
        return self.clamp(0.0, None)

    def chunk(self, parts: int, dim: int) -> Sequence[OnnxValue]:
        return self.graph.nodes("Split", [self], parts, axis=dim)

    def clamp(self, low: float, high: float | None) -> OnnxValue:
        return self.graph.node("Clip", self, float(low), None if high is None else float(high))

    clamp_ = clamp

    def flip(self, axis: int) -> OnnxValue:
        return self.graph.node("Slice", self, [-1], [-_TO_THE_END], [axis], [-1])

    def float(self) -> OnnxValue:
        return self.graph.node("Cast", self, to=TensorProto.FLOAT)

    def log_softmax(self, axis: int) -> OnnxValue:
        return self.graph.node("LogSoftmax", self, axis=axis)

    def long(self) -> OnnxValue:
        return self.graph.node("Cast", self, to=TensorProto.INT64)

    def permute(self, *axes: int) -> OnnxValue:
        return self.graph.node("Transpose", self, perm=list(axes))

    def sum(self, axis: int) -> OnnxValue:
        return self.graph.node("ReduceSum", self, [axis], keepdims=0)


class OnnxOperations:
    """The operations of `TorchOperations` as nodes of a graph, which grows with each."""

    def __init__(self) -> None:
        self._nodes: list[list[onnx.NodeProto]] = [[]]  # of the graph, and of the step that is being written
        self._weights: dict[str, onnx.TensorProto] = {}
        self._count = 0

    def node(self, kind: str, *inputs: Any, **attributes: Any) -> OnnxValue:
        """Add a node of one output."""
        return self.nodes(kind, inputs, 1, **attributes)[0]

    def nodes(self, kind: str, inputs: Sequence[Any], outputs: int, **attributes: Any) -> list[OnnxValue]:
        """Add a node of some outputs; inputs are values, weights, numbers, lists of integers, or None for none."""
        self._count += 1
        names = [f"{kind}_{self._count}_{index}" for index in range(outputs)]
        input_names = [self._named(x) for x in inputs]
        self._nodes[-1].append(helper.make_node(kind, input_names, names, name=f"{kind}_{self._count}", **attributes))
        return [OnnxValue(self, name) for name in names]

    def _named(self, x: Any) -> str:
        if isinstance(x, OnnxValue):
            return x.name
        if x is None:
            return ""
        if isinstance(x, Tensor):
            name = f"constant_{len(self._weights)}"
            self._weights[name] = numpy_helper.from_array(np.ascontiguousarray(x.float().numpy()), name)
            return name
        array = np.asarray(x, np.float32 if isinstance(x, float) else np.int64)
        name = f"{array.dtype}_{'_'.join(map(str, array.reshape(-1).tolist()))}_{array.ndim}"
        self._weights.setdefault(name, numpy_helper.from_array(array, name))
        return name

    def constant(self, tensor: Tensor) -> Value:
        """The tensor itself, whose parts are constants too; the nodes that take it add it to the graph."""
        return tensor

    def concat(self, parts: Sequence[OnnxValue], axis: int) -> Value:
        return self.node("Concat", *parts, axis=axis) if len(parts) > 1 else parts[0]

    def slice(self, x: OnnxValue, axis: int, start: int, end: int | None) -> Value:
        return self.node("Slice", x, [start], [_TO_THE_END if end is None else end], [axis])

    def reshape(self, x: OnnxValue, shape: Sequence[int]) -> Value:
        value = self.node("Reshape", x, list(shape))
        value.shape = shape
        return value

    def pad(self, x: OnnxValue, axis: int, before: int, after: int) -> Value:
        rank = {1: 3, 3: 4}[axis]  # of (B, T, H) and of (B, C, F, T)
        return self.node(
            "Pad", x, [before if at == axis else after if at == axis + rank else 0 for at in range(2 * rank)]
        )

    def conv(self, x: OnnxValue, weight: OnnxValue, bias: OnnxValue | None, stride: Sequence[int], bins: int) -> Value:
        inputs = (x, weight) if bias is None else (x, weight, bias)
        return self.node("Conv", *inputs, strides=list(stride), pads=[bins, 0, bins, 0])

    def rms_norm(self, x: OnnxValue, eps: float) -> Value:
        mean = self.node("ReduceMean", self.node("Mul", x, x), axes=[-1], keepdims=1)
        return self.node("Div", x, self.node("Sqrt", self.node("Add", mean, eps)))

    def where(self, condition: OnnxValue, x: Any, y: Any) -> Value:
        return self.node("Where", condition, x, y)

    def arange(self, x: OnnxValue, axis: int) -> Value:
        return self.node("Range", 0, self._size(x, axis), 1)

    def zeros(self, like: OnnxValue, width: int) -> Value:
        batch = self.node("Unsqueeze", self._size(like, 0), [0])
        return self.reshape(self.node("Expand", 0.0, self.node("Concat", batch, [width], axis=0)), (0, width))

    def _size(self, x: OnnxValue, axis: int) -> OnnxValue:
        return self.node("Gather", self.node("Shape", x), axis)

    def scan(
        self, step: Step, states: Sequence[OnnxValue], inputs: Sequence[OnnxValue], *, reverse: bool
    ) -> tuple[Value, Sequence[Value]]:
        self._nodes.append([])
        self._count += 1
        names = [f"frame_{self._count}_{index}" for index in range(len(states) + len(inputs))]
        before = [OnnxValue(self, name) for name in names]
        for state, first in zip(before, states, strict=False):
            state.shape = first.shape
        after = step(before[: len(states)], before[len(states) :])
        after = [*after, self.node("Identity", after[0])]
        nodes = self._nodes.pop()
        body = helper.make_graph(nodes, f"step_{self._count}", _untyped(names), _untyped(v.name for v in after))
        *last, out = self.nodes(
            "Scan",
            [*states, *inputs],
            len(states) + 1,
            body=body,
            num_scan_inputs=len(inputs),
            scan_input_axes=[1] * len(inputs),
            scan_output_axes=[1],
            scan_input_directions=[int(reverse)] * len(inputs),
            scan_output_directions=[int(reverse)],
        )
        return out, last

    def input(self, name: str) -> OnnxValue:
        return OnnxValue(self, name)

    def model(
        self,
        inputs: Sequence[str],
        outputs: Mapping[str, OnnxValue],
        types: Mapping[str, tuple[bool, Sequence[int | str]]],
        metadata: Mapping[str, str],
    ) -> onnx.ModelProto:
        """The whole graph; `types` by name: float32 or else int64, and sizes, which are names where they vary."""
        for name, value in outputs.items():
            self._nodes[0].append(helper.make_node("Identity", [value.name], [name], name=name))

        def described(names: Iterable[str]) -> list[onnx.ValueInfoProto]:
            kinds = {True: TensorProto.FLOAT, False: TensorProto.INT64}
            return [helper.make_tensor_value_info(n, kinds[types[n][0]], list(types[n][1])) for n in names]

        graph = helper.make_graph(
            self._nodes[0], "ds2", described(inputs), described(outputs), list(self._weights.values())
        )
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=_IR_VERSION, producer_name="ds2"
        )
        helper.set_model_props(model, dict(metadata))
        onnx.checker.check_model(model)
        return model


def _untyped(names: Iterable[str]) -> list[onnx.ValueInfoProto]:
    return [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names]
