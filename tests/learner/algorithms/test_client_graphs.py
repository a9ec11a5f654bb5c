"""Graphs that the real SDK made, which must compute what it computed, and graphs of an attacker, which must not run."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from learner.algorithms import client_graph_calls
from learner.algorithms.client_graphs import (
    MAX_ELEMENTS,
    MAX_NODES,
    GraphError,
    GraphLoss,
    LossGraph,
    WorkBudget,
)

FOLDER = Path(__file__).parent / "client_graphs"
SDK_GRAPHS = sorted(path.stem for path in FOLDER.glob("*.json"))
LENGTH = 6
REF = {"ref": "logprobs"}


def node(name: str, target: str, *args: object, op: str = "call_function", **kwargs: object) -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def method(name: str, target: str, *args: object, **kwargs: object) -> dict[str, Any]:
    return node(name, target, *args, op="call_method", **kwargs)


def graph_of(*nodes: dict[str, Any], loss: str | None = None, metrics: Mapping[str, object] | None = None) -> LossGraph:
    """A graph of logprobs and these nodes, whose loss is the last one."""
    returned = {"tuple": [{"ref": loss or nodes[-1]["name"]}, {"dict": dict(metrics or {})}]}
    return parsed(
        [node("logprobs", "logprobs", op="placeholder"), *nodes, node("output", "output", returned, op="output")]
    )


def parsed(nodes: Sequence[object], inputs: Sequence[object] = ({"name": "logprobs", "rank": 1},)) -> LossGraph:
    return LossGraph.parse(name="attack", inputs=inputs, graph={"format": 1, "nodes": list(nodes)})


def run(graph: LossGraph, length: int = LENGTH) -> GraphLoss:
    logprobs = -torch.ones(length).requires_grad_()
    return graph.run(logprobs, {}, budget=WorkBudget())


def refused_at_once(*nodes: dict[str, Any], match: str) -> None:
    with pytest.raises(GraphError, match=match):
        graph_of(*nodes)


def refused_when_run(*nodes: dict[str, Any], match: str) -> None:
    with pytest.raises(GraphError, match=match):
        run(graph_of(*nodes))


@pytest.mark.parametrize("name", SDK_GRAPHS)
def test_graphs_of_the_sdk_compute_what_it_computes(name: str) -> None:
    told = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    graph = LossGraph.parse(name=told["name"], inputs=told["inputs"], graph=told["graph"])
    inputs: dict[str, Tensor] = {key: torch.tensor(value) for key, value in told["datum"].items()}
    logprobs = inputs.pop("logprobs").requires_grad_()

    found = graph.run(logprobs, inputs, budget=WorkBudget())

    (gradient,) = torch.autograd.grad(found.loss, logprobs)
    torch.testing.assert_close(float(found.loss.detach()), told["loss"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, torch.tensor(told["gradient"]), rtol=1e-6, atol=1e-6)
    assert dict(found.metrics) == pytest.approx(told["metrics"])
    assert [(each.name, each.rank) for each in graph.inputs] == [(x["name"], x["rank"]) for x in told["inputs"]]


def test_there_are_graphs_of_the_sdk() -> None:
    assert len(SDK_GRAPHS) >= 7


@pytest.mark.parametrize(
    "target",
    [
        "torch.load",
        "torch.save",
        "torch.hub.load",
        "torch.ops.load_library",
        "torch.ops.aten.add",
        "torch.compile",
        "torch.from_file",
        "torch.tensor",
        "torch.rand",
        "torch.set_num_threads",
        "torch.utils.cpp_extension.load",
        "torch._C._nn.__loader__",
        "torch.nn.functional.torch.load",
        "torch.nn.functional.dropout",
        "torch.package.PackageImporter",
        "torch.Tensor.numpy",
        "torch.from_numpy",
        "torch.einsum",
        "builtins.eval",
        "eval",
        "exec",
        "open",
        "__import__",
        "builtins.__import__",
        "os.system",
        "subprocess.run",
        "operator.attrgetter",
        "operator.methodcaller",
        "operator.itemgetter",
        "operator.call",
        "operator.setitem",
        "operator.concat",
        "math.factorial",
        "math.comb",
        "",
        "torch.",
        "torch.abs.__globals__",
    ],
)
def test_functions_outside_of_the_tables_are_refused_by_name(target: str) -> None:
    refused_at_once(node("bad", target, REF), match="node 'bad': .* is no function that a custom loss may call")


@pytest.mark.parametrize(
    "target",
    [
        "__class__",
        "__reduce__",
        "__getattribute__",
        "__init__",
        "apply_",
        "map_",
        "backward",
        "register_hook",
        "requires_grad_",
        "item",
        "tolist",
        "numpy",
        "storage",
        "untyped_storage",
        "data_ptr",
        "set_",
        "resize_",
        "add_",
        "cuda",
        "type",
        "share_memory_",
        "split",
        "unbind",
        "where_not",
    ],
)
def test_methods_outside_of_the_tables_are_refused_by_name(target: str) -> None:
    refused_at_once(method("bad", target, REF), match="node 'bad': .* is no method that a custom loss may call")


@pytest.mark.parametrize("name", ["__class__", "__globals__", "grad_fn", "data", "grad", "_base", "is_cuda", "H", ""])
@pytest.mark.parametrize("target", ["getattr", "builtins.getattr"])
def test_getattr_reaches_a_few_attributes_alone(target: str, name: str) -> None:
    refused_at_once(node("bad", target, REF, name), match="node 'bad': the attribute")


def test_a_chain_of_getattr_ends_at_its_first_link() -> None:
    shape = node("shape", "getattr", REF, "shape")
    refused_at_once(shape, node("bad", "getattr", {"ref": "shape"}, "__class__"), match="the attribute '__class__'")
    # An attribute that tensors have, of something that is no tensor.
    refused_when_run(shape, node("bad", "getattr", {"ref": "shape"}, "values"), match="'bad' .*has no attribute")
    refused_at_once(node("bad", "getattr", REF, {"ref": "logprobs"}), match="the attribute")
    refused_at_once(node("bad", "getattr", REF, "shape", None), match="the attribute")


@pytest.mark.parametrize("op", ["call_module", "get_attr", "placeholder ", "exec"])
def test_other_kinds_of_nodes_are_refused(op: str) -> None:
    refused_at_once(node("bad", "weight", REF, op=op), match=f"node 'bad': '{op}' is not allowed")


BILLION = 10**12


@pytest.mark.parametrize(
    "nodes",
    [
        [node("big", "torch.ones", BILLION)],
        [node("big", "torch.zeros", [1 << 20, 1 << 20])],
        [node("big", "torch.full", {"tuple": [BILLION]}, 1.0)],
        [node("big", "torch.arange", BILLION)],
        [node("big", "torch.linspace", 0, 1, BILLION)],
        [method("big", "new_ones", REF, BILLION)],
        [method("big", "expand", REF, BILLION, LENGTH)],
        [method("big", "repeat", REF, BILLION)],
        [node("big", "torch.tile", REF, [BILLION])],
        [node("big", "torch.broadcast_to", REF, [BILLION, LENGTH])],
        [
            node("long", "torch.arange", MAX_ELEMENTS // 2),
            node("column", "torch.unsqueeze", {"ref": "long"}, 1),
            node("big", "operator.add", {"ref": "long"}, {"ref": "column"}),
        ],
        [
            node("long", "torch.ones", 1 << 20),
            node("index", "torch.zeros", [100, 100], dtype={"dtype": "int64"}),
            method("wide", "expand", {"ref": "long"}, 1, -1),
            node("big", "operator.getitem", {"ref": "wide"}, {"ref": "index"}),
        ],
        [node("long", "torch.ones", 1 << 20), node("big", "torch.diag", {"ref": "long"})],
    ],
    ids=lambda nodes: str(nodes[-1]["target"]),
)
def test_large_tensors_are_refused_before_they_are_made(nodes: list[dict[str, Any]]) -> None:
    refused_when_run(*nodes, match="node 'big' .*(would make a tensor of|cannot be computed)")


def test_work_is_bounded_over_all_nodes_and_datums() -> None:
    rounds = [node("n0", "torch.ones", 1 << 22)]
    rounds += [node(f"n{k}", "torch.exp", {"ref": f"n{k - 1}"}) for k in range(1, 40)]
    refused_when_run(*rounds, method("sum", "sum", {"ref": "n39"}), match="node 'n[0-9]*' .*read and written more than")
    small = graph_of(method("loss", "sum", REF))
    budget = WorkBudget(operation=3 * (2 * LENGTH + 1))
    for _ in range(3):
        small.run(torch.zeros(LENGTH), {}, budget=budget)
    with pytest.raises(GraphError, match="read and written more than"):
        small.run(torch.zeros(LENGTH), {}, budget=budget)


def test_products_of_matrices_count_what_they_multiply() -> None:
    square = node("square", "torch.ones", [4096, 4096])
    again = [node(f"p{k}", "operator.matmul", {"ref": "square"}, {"ref": "square"}) for k in range(1)]
    refused_when_run(square, *again, method("sum", "sum", {"ref": "p0"}), match="node 'p0' .*read and written more")


@pytest.mark.parametrize(
    ("target", "args"),
    [
        ("operator.pow", (10, 10**9)),
        ("operator.pow", (10.0, 1e9)),
        ("operator.pow", (2, 64)),
        ("operator.mul", (2**62, 2**62)),
        ("operator.mul", ([0], 10**9)),
        ("operator.pow", (-1.0, 0.5)),
        ("operator.add", ([1], [2])),
        ("math.exp", (10**6,)),
    ],
)
def test_pythons_own_numbers_stay_small(target: str, args: tuple[object, ...]) -> None:
    refused_when_run(node("bad", target, *args), match="node 'bad' .*cannot be computed")


def test_a_text_or_list_is_not_repeated_as_often_as_a_tensor_says() -> None:
    often = [node("n", "torch.full", [], 10**9, dtype={"dtype": "int64"})]
    for bad in ([0], "mean"):
        refused_when_run(*often, node("bad", "operator.mul", bad, {"ref": "n"}), match="is no number and no tensor")
    for text in ("%999999999d", "ab"):
        bad_node = node("bad", "operator.mod", text, {"ref": "n"})
        refused_at_once(*often, bad_node, match="node 'bad': the text .*: expected one of batchmean")


@pytest.mark.parametrize("keyword", ["device", "dtype", "layout", "memory_format", "ref", "float", "ellipsis"])
def test_a_text_under_the_keyword_of_a_coded_value_is_a_text_too(keyword: str) -> None:
    """A device by its name is not found again where the size is found out: the tensor would be made then."""
    sizes = [MAX_ELEMENTS + 1]
    refused_at_once(method("a", "new_full", REF, sizes, 1.0, **{keyword: "cpu"}), match="the text 'cpu'")
    refused_at_once(node("a", "torch.sum", REF, {"dict": {keyword: "cpu"}}), match="the text 'cpu'")
    refused_at_once(node("a", "torch.sum", REF, {"tuple": [{"dict": {keyword: ["cpu"]}}]}), match="the text 'cpu'")


def test_texts_choose_no_way_that_takes_long() -> None:
    refused_at_once(method("bad", "norm", REF, "nuc"), match="node 'bad': the text 'nuc'")
    refused_at_once(method("bad", "norm", REF, p="nuc"), match="node 'bad': the text 'nuc'")
    refused_at_once(node("bad", "torch.norm", REF, {"tuple": ["nuc"]}), match="node 'bad': the text 'nuc'")
    graph_of(node("fine", "torch.nn.functional.huber_loss", REF, REF, reduction="sum"))


@pytest.mark.parametrize(
    "target", ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "cosine_similarity", "dist"]
)
def test_what_is_spread_before_it_is_added_up_counts(target: str) -> None:
    long = node("long", "torch.ones", 1 << 14)
    column = node("column", "torch.reshape", {"ref": "long"}, [-1, 1])
    name = f"torch.{target}" if target == "dist" else f"torch.nn.functional.{target}"
    bad = node("bad", name, {"ref": "long"}, {"ref": "column"})
    refused_when_run(long, column, bad, match="node 'bad' .*would make a tensor of 268435456 elements")


def test_a_node_refers_to_earlier_nodes_alone() -> None:
    refused_at_once(node("a", "torch.exp", {"ref": "b"}), node("b", "torch.exp", {"ref": "a"}), match="nodes before it")
    refused_at_once(node("a", "torch.exp", {"ref": "a"}), match="node 'a': .* nodes before it")
    refused_at_once(node("logprobs", "torch.exp", REF), match="node 'logprobs' comes twice")


def test_graphs_that_are_huge_are_refused() -> None:
    refused_at_once(*[node(f"n{k}", "torch.exp", REF) for k in range(MAX_NODES)], match="nodes: expected at most")
    deep: object = 1
    for _ in range(40):
        deep = [deep]
    refused_at_once(node("bad", "torch.exp", deep), match="node 'bad': arguments are too many, or too deep")
    refused_at_once(node("bad", "torch.stack", [1] * 100_000), match="too many")
    refused_at_once(node("bad", "torch.exp", "x" * 1000), match="a text of 1000 letters")
    refused_at_once(node("bad", "torch.exp", 1 << 80), match="beyond 64 bits")


@pytest.mark.parametrize(
    "argument",
    [
        {"ref": "logprobs", "more": 1},
        {"ref": 3},
        {"dtype": "load"},
        {"dtype": "float32.__class__"},
        {"float": "1e5"},
        {"slice": [1]},
        {"layout": "sparse_coo"},
        {"function": "torch.load"},
        {},
        {"memory_format": "hub"},
    ],
)
def test_arguments_of_other_kinds_are_refused(argument: object) -> None:
    refused_at_once(node("bad", "torch.exp", argument), match="node 'bad': .* is no argument that is known")


@pytest.mark.parametrize("keyword", ["out", "inplace", "generator", "requires_grad", "pin_memory"])
def test_keywords_that_change_more_than_the_result_are_refused(keyword: str) -> None:
    bad = {**node("bad", "torch.exp", REF), "kwargs": {keyword: REF}}
    refused_at_once(bad, match=f"node 'bad' .*the argument {keyword} is not allowed")


@pytest.mark.parametrize(
    "returned",
    [
        None,
        {"ref": "loss"},
        {"tuple": [{"ref": "loss"}]},
        {"tuple": [1.0, {"dict": {}}]},
        {"tuple": [{"ref": "loss"}, {"dict": {"loss:sum": {"ref": "loss"}}}]},
        {"tuple": [{"ref": "loss"}, {"dict": {"custom/x:max": {"ref": "loss"}}}]},
        {"tuple": [{"ref": "loss"}, {"dict": {"custom/x:sum": 1.0}}]},
        {"tuple": [{"ref": "loss"}, {"dict": {f"custom/{k}:sum": {"ref": "loss"} for k in range(100)}}]},
    ],
)
def test_a_graph_returns_a_loss_and_named_metrics(returned: object) -> None:
    nodes = [node("logprobs", "logprobs", op="placeholder"), method("loss", "sum", REF)]
    with pytest.raises(GraphError, match=r"expected"):
        parsed([*nodes, node("output", "output", returned, op="output")])


def test_what_is_no_graph_is_refused() -> None:
    for nodes in ([], ["x"], [None], [{"op": 1}], [node("output", "output", op="output")]):
        with pytest.raises(GraphError):
            parsed(nodes)
    with pytest.raises(GraphError, match="format"):
        LossGraph.parse(name="x", inputs=[{"name": "logprobs", "rank": 1}], graph={"format": 2, "nodes": []})
    for inputs in (
        [],
        [{"name": "weights", "rank": 1}],
        [{"name": "logprobs", "rank": 0}],
        [{"name": "a b", "rank": 1}],
    ):
        with pytest.raises(GraphError, match="expected"):
            parsed([], inputs)
    twice = [{"name": "logprobs", "rank": 1}] * 2
    with pytest.raises(GraphError, match="same name"):
        parsed([], twice)


def test_a_loss_is_one_number() -> None:
    for bad in (method("loss", "exp", REF), method("loss", "size", REF, 0), method("loss", "argmax", REF)):
        with pytest.raises(GraphError, match=r"the loss, node 'loss', is .*: expected a scalar tensor of floats"):
            run(graph_of(bad))
    with pytest.raises(GraphError, match="the metric 'custom/x:sum' is a tensor"):
        run(graph_of(method("loss", "sum", REF), metrics={"custom/x:sum": REF}))


def test_an_error_of_torch_names_the_node() -> None:
    refused_when_run(
        node("wide", "torch.ones", 5), node("bad", "operator.add", REF, {"ref": "wide"}), match="node 'bad'"
    )
    refused_when_run(node("bad", "operator.getitem", REF, 99), match=r"node 'bad' \(operator.getitem\) cannot be comp")
    refused_when_run(
        node("far", "torch.full", [2], 99, dtype={"dtype": "int64"}),
        node("bad", "torch.gather", REF, 0, {"ref": "far"}),
        match="node 'bad'",
    )


def test_the_inputs_are_not_changed_by_what_python_does_in_place() -> None:
    graph = graph_of(node("more", "operator.iadd", REF, 1.0), method("loss", "sum", {"ref": "more"}))
    logprobs = torch.zeros(3)
    assert float(graph.run(logprobs, {}, budget=WorkBudget()).loss.detach()) == 3.0
    assert logprobs.tolist() == [0.0, 0.0, 0.0]


def test_a_device_is_not_the_clients_to_choose() -> None:
    moved = method("moved", "to", REF, "cuda:0")
    made = node("made", "torch.zeros", LENGTH, device={"device": "cuda:3"})
    both = node("both", "operator.add", {"ref": "moved"}, {"ref": "made"})
    assert float(run(graph_of(moved, made, both, method("loss", "sum", {"ref": "both"}))).loss.detach()) == -LENGTH


def test_no_table_has_a_name_that_reaches_further() -> None:
    unsafe = ("load", "save", "hub", "ops", "apply", "eval", "item", "numpy", "file", "hook", "compile", "import")
    targets = [*client_graph_calls._FUNCTIONS, *client_graph_calls._METHODS]
    assert [each for each in targets if any(bad in each.rpartition(".")[2].split("_") for bad in unsafe)] == []
    assert [each for each in client_graph_calls._METHODS if each.startswith("_") or each.endswith("_")] == []
    assert all(callable(client_graph_calls.function(each)) for each in client_graph_calls._FUNCTIONS)
    assert all(hasattr(Tensor, each) for each in client_graph_calls._METHODS)
