"""The acceptance head: the graph computes the formula, the neutral one believes q̂, a trained one is calibrated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from omnidraft.adapters.head import Standard, calibration, gradient, logits, train
from omnidraft.export.head_graph import write_head
from omnidraft.runtime.acceptance import AcceptanceHead, neutral, shapes
from omnidraft.runtime.adapter_file import load_adapter, save_adapter
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.features import FEATURES

torch = pytest.importorskip("torch")
H, F = 24, len(FEATURES)
Array = np.ndarray[Any, Any]


def random_head(seed: int = 0, dtype: type = np.float32) -> dict[str, Array]:
    """Every parameter matters."""
    rng = np.random.default_rng(seed)
    return {name: (rng.standard_normal(shape) * 0.3).astype(dtype) for name, shape in shapes(H).items()}


def random_inputs(n: int, seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, H)).astype(np.float32), rng.standard_normal((n, F)).astype(np.float32)


def sigmoid(z: Array) -> Array:
    return 1 / (1 + np.exp(-z.astype(np.float64)))


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """head.onnx with the weights of `random_head()`."""
    write_head(tmp_path / "head.onnx", random_head())
    return tmp_path / "head.onnx"


def run(head: AcceptanceHead, hidden: Array, features: Array) -> Array:
    return np.array([head.logit(h, f) for h, f in zip(hidden, features, strict=True)])


# --- the graph


def test_the_graph_computes_the_formula(graph: Path) -> None:
    hidden, features = random_inputs(50)
    head = AcceptanceHead(graph)
    assert head.hidden_size == H
    p = {name.removeprefix("acceptance."): value.astype(np.float64) for name, value in random_head().items()}
    layer = np.concatenate([hidden, features], 1) @ p["w1"] + p["b1"]
    z = (layer * sigmoid(layer)) @ p["w2"] + features @ p["skip"] + p["b2"]
    assert np.abs(run(head, hidden, features) - z[:, 0]).max() < 1e-5
    assert np.abs(logits(random_head(), hidden, features) - z[:, 0]).max() < 1e-5


def test_the_graph_takes_many_rows_and_standard_operators_only(graph: Path) -> None:
    import onnxruntime as ort

    onnx.checker.check_model(str(graph), full_check=True)
    model = onnx.load(graph)
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 17)]
    assert {node.domain for node in model.graph.node} == {""}
    hidden, features = random_inputs(7)
    found = ort.InferenceSession(graph).run(["logit"], {"hidden": hidden, "features": features})[0]
    assert found.shape == (7,) and np.abs(found - logits(random_head(), hidden, features)).max() < 1e-5


def test_the_neutral_head_says_what_the_drafter_says(tmp_path: Path) -> None:
    write_head(tmp_path / "head.onnx", neutral(H))
    head = AcceptanceHead(tmp_path / "head.onnx")
    hidden, features = random_inputs(200)
    q = np.random.default_rng(1).uniform(0.001, 0.999, 200)
    features[:, 0] = np.log(q / (1 - q))
    assert np.array_equal(run(head, hidden, features), features[:, 0])
    assert np.array_equal(logits(neutral(H), hidden, features), features[:, 0])
    assert np.abs(sigmoid(run(head, hidden, features)) - q).max() < 1e-6
    assert neutral(H)["acceptance.w1"].var() == pytest.approx(1 / (H + F), rel=0.1)
    assert np.array_equal(neutral(H)["acceptance.w1"], neutral(H)["acceptance.w1"])
    assert not np.array_equal(neutral(H, seed=1)["acceptance.w1"], neutral(H)["acceptance.w1"])


def test_learned_weights_take_the_place_of_the_graphs_and_none_restores_them(graph: Path, tmp_path: Path) -> None:
    hidden, features = random_inputs(20)
    head, learned = AcceptanceHead(graph), random_head(seed=1)
    shipped = run(head, hidden, features)
    save_adapter(tmp_path / "learned.onnx_adapter", learned)
    head.use(load_adapter(tmp_path / "learned.onnx_adapter"))
    found = run(head, hidden, features)
    assert np.abs(found - logits(learned, hidden, features)).max() < 1e-5
    assert not np.isclose(found, shipped).any(), "the check is vacuous"
    head.use(learned)
    for value in learned.values():
        value[:] = 0
    assert np.array_equal(run(head, hidden, features), found), "the head looks at what it was given"
    head.use(neutral(H))
    assert np.array_equal(run(head, hidden, features), features[:, 0])
    head.use(None)
    assert np.array_equal(run(head, hidden, features), shipped)


def test_a_proposal_does_not_depend_on_the_one_before(graph: Path) -> None:
    head = AcceptanceHead(graph)
    hidden, features = random_inputs(20)
    assert np.array_equal(run(head, hidden, features), run(head, hidden[::-1], features[::-1])[::-1])


# --- errors


def broken(fault: str) -> dict[str, Array]:
    parameters = random_head()
    if fault == "missing":
        del parameters["acceptance.b1"]
    elif fault == "unknown":
        parameters["layers.0.q.lora_A"] = np.zeros((4, 2), np.float32)
    elif fault == "skip":
        parameters["acceptance.skip"] = np.zeros((F + 1, 1), np.float32)
    elif fault == "flat":
        parameters["acceptance.b2"] = np.zeros(1, np.float32)
    elif fault == "not finite":
        parameters["acceptance.w2"][3] = np.nan
    return parameters


@pytest.mark.parametrize("fault", ["missing", "unknown", "skip", "flat", "not finite"])
def test_parameters_that_do_not_fit_are_one_line_and_change_nothing(fault: str, graph: Path, tmp_path: Path) -> None:
    head, (hidden, features) = AcceptanceHead(graph), random_inputs(5)
    head.use(random_head(seed=1))
    before = run(head, hidden, features)
    for refuse in (
        head.use,
        lambda p: write_head(tmp_path / "other.onnx", p),
        lambda p: train(p, hidden, features, np.ones(5), 1),
    ):
        with pytest.raises(OmniDraftError, match=r"^acceptance head: \S+ .*; (train|give) [^\n]*$"):
            refuse(broken(fault))
    assert not (tmp_path / "other.onnx").exists()
    assert np.array_equal(run(head, hidden, features), before)


def test_a_head_of_another_drafter_is_refused_with_both_shapes(graph: Path) -> None:
    with pytest.raises(
        OmniDraftError, match=rf"w1 has shape \[{H + 1 + F}, 64\], not \[{H + F}, 64\].*another drafter"
    ):
        AcceptanceHead(graph).use(neutral(H + 1))


@pytest.mark.parametrize("damage", ["missing", "empty", "text", "cut", "half", "fixed", "scalar"])
def test_a_damaged_graph_is_one_line_that_names_it(damage: str, graph: Path) -> None:
    data = graph.read_bytes()
    AcceptanceHead(graph)
    if damage == "missing":
        graph.unlink()
    elif damage in ("fixed", "scalar"):  # graphs that ONNX Runtime can load
        model = onnx.load(graph)
        if damage == "fixed":
            del model.graph.input[2:]  # the weights cannot be overridden then
        else:
            model.graph.CopyFrom(onnx.parser.parse_graph("g (float hidden) => (float logit) { logit = Neg(hidden) }"))
        onnx.save(model, graph)
    else:
        graph.write_bytes(
            {"empty": b"", "text": b"not a graph", "cut": data[:-1], "half": data[: len(data) // 2]}[damage]
        )
    with pytest.raises(OmniDraftError, match=rf"^{graph}: [^\n]*; export again$"):
        AcceptanceHead(graph)


def test_inputs_that_do_not_fit_are_one_line() -> None:
    hidden, features = random_inputs(5)
    for wrong in ((hidden[:, 1:], features), (hidden, features[:, 1:]), (hidden, features[1:])):
        with pytest.raises(ValueError, match=r"^hidden \[.*\] and features \[[^\n]*$"):
            logits(random_head(), *wrong)
    for labels in (np.ones(4), np.ones((5, 1)), np.full(5, 1.1), np.full(5, np.nan)):
        with pytest.raises(ValueError, match="labels"):
            train(random_head(), hidden, features, labels, 1)
    with pytest.raises(ValueError, match="not finite"):
        train(random_head(), np.where(hidden == hidden[2, 3], np.inf, hidden), features, np.ones(5), 1)
    with pytest.raises(ValueError, match="labels"):
        train(random_head(), hidden[:0], features[:0], np.ones(0), 1)


# --- the gradient


def test_the_gradient_is_that_of_finite_differences() -> None:
    parameters, (hidden, features) = random_head(dtype=np.float64), random_inputs(11)
    labels, step = np.random.default_rng(2).random(11), 1e-5
    _, found = gradient(parameters, hidden.astype(np.float64), features.astype(np.float64), labels)
    for name, slope in found.items():
        assert slope.shape == parameters[name].shape
        rng = np.random.default_rng(3)
        for _ in range(5):
            direction = rng.standard_normal(slope.shape)
            ends = []
            for sign in (1, -1):
                moved = {**parameters, name: parameters[name] + sign * step * direction}
                ends.append(gradient(moved, hidden.astype(np.float64), features.astype(np.float64), labels)[0])
            assert (ends[0] - ends[1]) / (2 * step) == pytest.approx((slope * direction).sum(), rel=1e-6, abs=1e-9)


def test_the_gradient_is_torchs() -> None:
    hidden, features = random_inputs(33)
    labels = np.random.default_rng(2).random(33).astype(np.float32)
    loss, found = gradient(random_head(), hidden, features, labels)
    p = {name: torch.tensor(value, requires_grad=True) for name, value in random_head().items()}
    layer = torch.tensor(np.concatenate([hidden, features], 1)) @ p["acceptance.w1"] + p["acceptance.b1"]
    direct = torch.tensor(features) @ p["acceptance.skip"] + p["acceptance.b2"]
    z = torch.nn.functional.silu(layer) @ p["acceptance.w2"] + direct
    expected = torch.nn.functional.binary_cross_entropy_with_logits(z[:, 0], torch.tensor(labels))
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    for name, tensor in p.items():
        assert np.abs(found[name] - tensor.grad.numpy()).max() < 1e-5 * np.abs(found[name]).max() + 1e-7, name


def test_the_gradient_of_many_is_the_mean_of_each() -> None:
    """Large products are made in parts."""
    hidden, features = random_inputs(600)
    labels = np.random.default_rng(2).random(600)
    loss, whole = gradient(random_head(), hidden, features, labels)
    parts = [gradient(random_head(), hidden[i : i + 20], features[i : i + 20], labels[i : i + 20])
             for i in range(0, 600, 20)]  # fmt: skip
    assert loss == pytest.approx(np.mean([part[0] for part in parts]), rel=1e-5)
    for name, slope in whole.items():
        assert np.abs(slope - np.mean([part[1][name] for part in parts], axis=0)).max() < 1e-5, name


def test_loss_and_gradient_stay_finite_where_a_sigmoid_is_0_or_1() -> None:
    hidden, features = random_inputs(2)
    sure = {**random_head(), "acceptance.b2": np.array([[1e4]], np.float32)}
    with np.errstate(over="raise", divide="raise", invalid="raise"):
        loss, found = gradient(sure, hidden, features, np.zeros(2, np.float32))
    assert loss == pytest.approx(1e4, rel=1e-2) and all(np.isfinite(value).all() for value in found.values())


# --- learning


def problem(n: int, seed: int) -> tuple[Array, Array, Array, Array]:
    """Hidden states of odd scale and features; the probability of acceptance, which q̂ overstates; what happened."""
    line = np.random.default_rng(9).standard_normal(H) / np.sqrt(H)
    rng = np.random.default_rng(seed)
    h, features = rng.standard_normal((n, H)), rng.standard_normal((n, F))
    features[:, 0] = np.clip(2 * features[:, 0], -7, 7)
    features[:, 4] = rng.random(n) < 0.05
    features[:, 8] = 0.7  # one temperature
    p = sigmoid(0.6 * features[:, 0] - 1.5 + 1.5 * np.abs(h @ line) + features[:, 4])
    hidden = (30 * h + 7).astype(np.float32)
    return hidden, features.astype(np.float32), p, (rng.random(n) < p).astype(np.float32)


@pytest.fixture(scope="module")
def trained() -> dict[str, Array]:
    hidden, features, _, accepted = problem(8000, seed=0)
    return train(neutral(H), hidden, features, accepted, epochs=10)


def test_training_finds_a_known_probability(trained: dict[str, Array], tmp_path: Path) -> None:
    hidden, features, p, accepted = problem(8000, seed=1)
    learned, shipped = (sigmoid(logits(head, hidden, features)) for head in (trained, neutral(H)))
    assert calibration(learned, accepted).error < 0.03 < calibration(shipped, accepted).error
    assert abs(calibration(learned, accepted).bias) < 0.02
    assert np.abs(learned - p).mean() < 0.5 * np.abs(shipped - p).mean()
    assert gradient(trained, hidden, features, accepted)[0] < gradient(neutral(H), hidden, features, accepted)[0]
    write_head(tmp_path / "head.onnx", trained)
    again = run(AcceptanceHead(tmp_path / "head.onnx"), hidden[:200], features[:200])
    assert np.abs(again - logits(trained, hidden, features)[:200]).max() < 1e-4


def test_labels_that_say_nothing_new_teach_nothing_wrong() -> None:
    """The control: q̂ is true here, so what was learned stays calibrated."""
    hidden, features, *_ = problem(8000, seed=2)
    q = sigmoid(features[:, 0])
    learned = train(neutral(H), hidden, features, q, epochs=4)
    assert calibration(sigmoid(logits(learned, hidden, features)), q).error < 0.01


def test_training_is_the_same_for_a_seed(trained: dict[str, Array]) -> None:
    hidden, features, _, accepted = problem(8000, seed=0)
    again = train(neutral(H), hidden, features, accepted, epochs=10)
    assert all(np.array_equal(again[name], value) and value.dtype == np.float32 for name, value in trained.items())
    other = train(neutral(H), hidden, features, accepted, epochs=10, seed=1)
    assert not np.array_equal(other["acceptance.w1"], trained["acceptance.w1"])


def test_training_leaves_what_it_is_given_alone() -> None:
    hidden, features, _, accepted = problem(200, seed=0)
    given = neutral(H), hidden.copy(), features.copy(), accepted.copy()
    train(*given, epochs=1)
    assert all(np.array_equal(given[0][name], value) for name, value in neutral(H).items())
    assert all(np.array_equal(a, b) for a, b in zip(given[1:], (hidden, features, accepted), strict=True))


def test_no_epochs_change_nothing_and_learning_goes_on_from_what_was_learned(trained: dict[str, Array]) -> None:
    hidden, features, _, accepted = problem(2000, seed=3)
    for head in (neutral(H), trained):
        same = train(head, hidden, features, accepted, epochs=0)
        assert np.abs(logits(same, hidden, features) - logits(head, hidden, features)).max() < 1e-4
    further = train(trained, hidden, features, accepted, epochs=1, rate=1e-6)
    assert np.abs(logits(further, hidden, features) - logits(trained, hidden, features)).max() < 0.01


def test_standard_coordinates_are_another_name_for_the_same_head() -> None:
    hidden, features, *_ = problem(500, seed=4)
    x = np.concatenate([hidden, features], 1)
    standard, head = Standard.of(x), random_head()
    inside = standard.inputs(x)
    varying = np.arange(H + F) != H + 8
    assert np.abs(inside.mean(0)).max() < 1e-5 and np.abs(inside.std(0)[varying] - 1).max() < 1e-5
    assert not inside[:, ~varying].any() and np.array_equal(standard.constant, ~varying)
    raw = logits(standard.outward(head), hidden, features)
    assert np.abs(raw - logits(head, inside[:, :H], inside[:, H:])).max() < 1e-4
    back = standard.inward(standard.outward(head))
    assert all(np.abs(back[name] - value).max() < 1e-5 for name, value in head.items())


@pytest.mark.parametrize("value", [0.7, 1e6, -3e-9])
def test_a_constant_feature_changes_nothing_now_or_when_it_moves_later(value: float) -> None:
    hidden, features, _, accepted = problem(2000, seed=5)
    features[:, 8] = 0
    without = logits(train(neutral(H), hidden, features, accepted, epochs=2), hidden, features)
    features[:, 8] = value
    learned = train(neutral(H), hidden, features, accepted, epochs=2)
    assert np.abs(logits(learned, hidden, features) - without).max() < 1e-4
    features[:, 8] = value + 1
    assert np.abs(logits(learned, hidden, features) - without).max() < 1e-4


def test_one_sample_is_enough_to_learn_from() -> None:
    hidden, features = random_inputs(1)
    learned = train(neutral(H), hidden, features, np.ones(1), epochs=50)
    assert logits(learned, hidden, features)[0] > features[0, 0]


# --- calibration


def test_calibration_of_known_cases() -> None:
    predicted = np.repeat([0.1, 0.3, 0.5, 0.9], 100)
    true = np.concatenate([np.arange(100) < 100 * share for share in (0.1, 0.3, 0.5, 0.9)]).astype(float)
    perfect = calibration(predicted, true, bins=4)
    assert perfect.error == pytest.approx(0, abs=1e-12) and perfect.bias == pytest.approx(0, abs=1e-12)
    assert [point.samples for point in perfect.bins] == [100] * 4
    assert [point.predicted for point in perfect.bins] == pytest.approx([0.1, 0.3, 0.5, 0.9])
    high = calibration(np.minimum(predicted + 0.1, 1), true, bins=4)
    assert high.error == pytest.approx(0.1) and high.bias == pytest.approx(0.1)
    backwards = calibration(predicted[::-1], true, bins=4)  # wrong everywhere, right on the whole
    assert backwards.error == pytest.approx(0.5) and backwards.bias == pytest.approx(0)


def test_equal_predictions_share_a_bin() -> None:
    """Else chance would split them into bins that are wrong each in its way."""
    coins = np.arange(100) < 50
    one = calibration(np.full(100, 0.5), coins.astype(float))
    assert one.error == 0 and [tuple(point) for point in one.bins] == [(0.5, 0.5, 100)]


def test_calibration_does_not_depend_on_order_and_takes_few_samples() -> None:
    rng = np.random.default_rng(0)
    predicted, observed = rng.random(1003), (rng.random(1003) < 0.5).astype(float)
    order = rng.permutation(1003)
    one, other = calibration(predicted, observed), calibration(predicted[order], observed[order])
    assert one.error == pytest.approx(other.error) and len(one.bins) == 10
    assert {point.samples for point in one.bins} == {100, 101}
    assert len(calibration(predicted[:3], observed[:3]).bins) == 3
    for wrong in ((predicted[:0], observed[:0]), (predicted, observed[1:])):
        with pytest.raises(ValueError, match="do not fit"):
            calibration(*wrong)
