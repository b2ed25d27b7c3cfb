"""The audit: every check finds its control and passes the faultless twin, and says what it cannot tell."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from detattn import contract
from detattn.audit import Target, audit, checks_markdown
from detattn.audit.bits import bytes_of, compare, ulp_distance
from detattn.audit.cases import edges
from detattn.audit.checks import CHECKS, Check, Pair
from detattn.audit.cli import main
from detattn.audit.engine import compare_all, run_check
from detattn.audit.execution import threads
from detattn.audit.faulty import FAULTS, control
from detattn.audit.probe import Probed, probe
from detattn.audit.runner import Runner
from detattn.audit.targets import NAMES, named

IDS = [p.id for p in contract.PROMISES]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The controls are many small operations, which more threads only slow down; nor do tests wait for each other."""
    with threads(1):
        yield


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """A function of the smallest signature that the audit takes: no mask, no lse."""
    group = q.shape[1] // k.shape[1]
    s = q @ k.repeat_interleave(group, 1).mT * scale
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + s.shape[-1] - s.shape[-2]), -math.inf)
    return s.softmax(-1) @ v.repeat_interleave(group, 1)


def sdpa_top_left(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)


# The promises and their checks


def test_one_check_and_one_fault_a_promise() -> None:
    assert set(CHECKS) == set(IDS) == set(FAULTS)
    assert [c.id for c in CHECKS.values()] == IDS


@pytest.mark.parametrize("id", IDS)
def test_the_twin_holds_and_the_control_is_found_in_every_tensor(id: str) -> None:
    """Both directions at once: "holds" needs equal bytes of the twin and a difference of the control."""
    report = audit(control(None), checks=[id], long=900 if id in ("chunked-prefill", "decode") else 200)
    result = report[id]
    assert result.status == "holds", report
    compared = {e.tensor for e in result.tensors}
    assert set(result.control) == compared
    assert {"dq", "dk", "dv"} <= compared if CHECKS[id].gradients else compared <= {"out", "lse"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_controls_work_in_every_dtype(dtype: torch.dtype) -> None:
    report = audit(control(None), checks=["layout", "bounds"], dtype=dtype, long=200)
    assert {r.status for r in report.results} == {"holds"}, report


@pytest.mark.parametrize("id", ["decode", "paged", "bounds", "lse-request"])
def test_a_planted_fault_breaks_its_promise(id: str) -> None:
    report = audit(control(id), checks=[id], long=600)
    assert report[id].status == "violated"
    assert report.exit_code == 1
    moved = next(e for e in report[id].tensors if e.differing)
    assert moved.tensor == "out"
    assert 0 < moved.differing <= moved.compared
    assert moved.max_ulp
    assert moved.first_case
    assert moved.expected != moved.got


QUIET = {"lse": "returns out alone"}


def found(id: str, target: Target, dtype: torch.dtype, long: int) -> bool:
    """Whether the check sees a difference in ``out``; stops at the first."""
    runner = Runner(target, CPU, dtype, False, long=long)
    return bool(compare_all(CHECKS[id], runner, until={"out"})[1]["out"].differing)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("id", IDS)
def test_a_fault_in_fp32_accumulators_is_found_after_rounding(id: str, dtype: torch.dtype) -> None:
    """Out alone, no lse: what most kernels show of a sum that was cut elsewhere."""
    target = control(id, like=None if id == "lse-request" else Target("", plain, lacks=QUIET))
    assert found(id, target, dtype, long=900)


def split(splits: Callable[[Tensor, Tensor], int]) -> Target:
    """Attention whose keys are cut into so many splits of fp32 partial sums. Nothing else depends on the call."""

    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        group, pieces = q.shape[1] // k.shape[1], []
        place = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
        for key in torch.arange(k.shape[2]).tensor_split(min(splits(q, k), k.shape[2])):
            kd, vd = (t[:, :, key].double().repeat_interleave(group, 1) for t in (k, v))
            s = (q.double() @ kd.mT).float() * scale
            s = s.masked_fill(key > place, -math.inf) if causal else s
            m = s.amax(-1, keepdim=True).clamp(min=-1e30)
            p = (s - m).double().exp().float()
            pieces.append((m, p.double().sum(-1, keepdim=True).float(), (p.double() @ vd).float()))
        top = torch.stack([m for m, _, _ in pieces]).amax(0)
        total, out = torch.zeros_like(top), torch.zeros(q.shape)
        for m, l, o in pieces:
            keep = (m - top).double().exp().float()
            total, out = total + l * keep, out + o * keep
        return (out / total).to(q.dtype)

    return Target.of(attention, lacks={"compile": "compiled, its arithmetic is another"})


SPLITS: dict[str, Callable[[Tensor, Tensor], int]] = {
    "batch-size": lambda q, k: 2 if q.shape[0] > 2 else 1,
    "chunked-prefill": lambda q, k: 2 if q.shape[2] < 512 else 1,
    "decode": lambda q, k: 2 if q.shape[2] <= 4 else 1,
    "layout": lambda q, k: 1 if q.is_contiguous() else 2,
    "heads": lambda q, k: min(2, k.shape[1]),
    "execution": lambda q, k: 1 if torch.get_num_threads() == 1 else 2,
}


@pytest.mark.parametrize("id", SPLITS)
def test_splits_of_the_keys_are_found_in_bf16(id: str) -> None:
    assert found(id, split(SPLITS[id]), torch.bfloat16, long=900)
    assert not found(id, split(lambda q, k: 1), torch.bfloat16, long=300)


def test_without_detection_there_is_no_power(monkeypatch: pytest.MonkeyPatch) -> None:
    short = audit(control(None), checks=["chunked-prefill"], long=400)
    assert short["chunked-prefill"].status == "no power"  # the planted fault needs 768 queries
    assert short.exit_code == 2
    monkeypatch.setitem(FAULTS, "rerun", type(FAULTS["rerun"])("no fault", lambda s: FAULTS["bounds"].cut(s)))
    blunt = audit(control(None), checks=["rerun"], long=140)["rerun"]
    assert (blunt.status, blunt.control) == ("no power", ())
    assert "out" in blunt.note


def test_a_check_that_compares_nothing_has_no_power() -> None:
    def nothing(r: Runner) -> Iterator[Pair]:
        yield from ()

    runner = Runner(control(None), CPU, torch.float32, False)
    assert run_check(Check("rerun", "", nothing), runner, Probed()).status == "no power"


# What it finds in other attentions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sdpa_on_the_cpu_changes_bits_with_the_query_count(dtype: torch.dtype) -> None:
    report = audit(named("sdpa", None, CPU, dtype), checks=["chunked-prefill", "decode"], dtype=dtype)
    assert report["decode"].status == report["chunked-prefill"].status == "violated", report
    assert report.exit_code == 1


def test_detattn_holds(device: str) -> None:
    target = named("detattn", None, torch.device(device), torch.bfloat16)
    report = audit(target, device=device, long=900)
    assert report.exit_code == 0, report
    if device == "cpu":
        assert report.counts["not applicable"] == 0
        assert not any(r.note for r in report.results), report


def test_a_bare_function_is_asked_only_for_what_its_signature_names() -> None:
    checks = ["decode", "right-padding", "packed", "lse-request", "mask-neutral"]
    report = audit(plain, checks=checks, dtype=torch.float32, long=900)
    assert [r.status for r in report.results] == ["violated", *["not applicable"] * 4], report
    assert "key_padding_mask" in report["right-padding"].note


def test_an_lse_that_comes_unasked_is_compared_too() -> None:
    def both(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        lse = torch.zeros(q.shape[:3])
        return plain(q, k, v, causal, scale), lse

    assert "lse is not exact" in audit(both, checks=["rerun"])["rerun"].note


def test_top_left_alignment_is_recognized() -> None:
    result = audit(sdpa_top_left, checks=["decode"])["decode"]
    assert (result.status, "top-left" in result.note) == ("not applicable", True)


def test_gradients_are_compared_where_there_are_any() -> None:
    def forward_only(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        return plain(q.detach(), k.detach(), v.detach(), causal, scale)

    def tensors(fn: object, **options: object) -> set[str]:
        report = audit(fn, checks=["rerun"], dtype=torch.float32, long=100, **options)  # type: ignore[arg-type]
        return {e.tensor for e in report["rerun"].tensors}

    assert tensors(plain) == {"out", "dq", "dk", "dv"}
    assert tensors(plain, backward=False) == tensors(forward_only) == {"out"}
    assert "no gradients" in audit(forward_only, checks=["rerun"], long=100)["rerun"].note
    with pytest.raises(ValueError, match="gradients"):
        audit(forward_only, checks=["rerun"], backward=True)


# What goes wrong


def raising(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    if q.shape[0] > 2:
        raise RuntimeError("no batches above 2")
    return plain(q, k, v, causal, scale)


def test_an_exception_is_an_error_and_never_a_pass() -> None:
    report = audit(raising, checks=["rerun", "batch-size"], dtype=torch.float32, long=300)
    assert report["rerun"].status == "holds"
    assert report["batch-size"].status == "error"
    assert "RuntimeError: no batches above 2" in report["batch-size"].note
    assert report.exit_code == 2


@pytest.mark.parametrize(
    "wrong",
    [
        lambda q, k, v, causal, scale: torch.zeros_like(q),
        lambda q, k, v, causal, scale: torch.full_like(q, math.nan),
        lambda q, k, v, causal, scale: plain(q, k, v, False, scale),
        lambda q, k, v, causal, scale: plain(q, k, v, causal, scale).float(),
        lambda q, k, v, causal, scale: plain(q, k, v, causal, scale)[:, :, :-1],
        lambda q, k, v, causal, scale: plain(q[:, :1], k, v, causal, scale),
    ],
    ids=["zeros", "NaN", "mask ignored", "another dtype", "a row less", "a head less"],
)
def test_what_is_not_attention_is_an_error_however_stable_its_bits(wrong: types.FunctionType) -> None:
    report = audit(wrong, checks=["rerun"])
    assert report["rerun"].status == "error", report
    assert report.exit_code == 2


def test_a_feature_that_does_not_work_is_named() -> None:
    def ungrouped(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        if q.shape[1] != k.shape[1]:
            raise ValueError("as many key heads as query heads")
        return plain(q, k, v, causal, scale)

    def deaf(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, key_padding_mask: object = None) -> Tensor:
        return plain(q, k, v, causal, scale)

    note = audit(ungrouped, checks=["rerun"])["rerun"].note
    assert "grouped" in note
    assert "lacks" in note
    assert audit(Target.of(ungrouped, lacks={"grouped": "no"}), checks=["heads"], long=100)["heads"].status == "holds"
    assert "padding: out is not exact" in audit(deaf, checks=["rerun"])["rerun"].note


def test_a_wrong_gradient_is_an_error() -> None:
    def halved(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        return plain(q, k, (v + v.detach()) / 2, causal, scale)

    assert "backward: dv" in audit(halved, checks=["rerun"])["rerun"].note


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="no check magic; there are rerun, batch-size"):
        audit(plain, checks=["magic"])
    with pytest.raises(ValueError, match="no check was named"):
        audit(plain, checks=[])
    with pytest.raises(TypeError, match="no parameter 'causal'"):
        audit(lambda q, k, v: q)
    with pytest.raises(ValueError, match="no feature speed"):
        Target("x", plain, lacks={"speed": "slow"})


def test_the_twin_and_the_named_targets_are_attention() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        targets = [control(None), *(named(n, None, CPU, dtype) for n in NAMES if n not in ("flex",) and "-" not in n)]
        for target in [*targets, named("sdpa-math", None, CPU, dtype)]:
            assert probe(Runner(target, CPU, dtype, False)) == Probed(), target.name


# Bits


def test_bytes_tell_what_equality_does_not() -> None:
    assert compare(torch.tensor([0.0]), torch.tensor([-0.0])).max_ulp == 0  # type: ignore[union-attr]
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert compare(nan, nan.clone()) is None
    found = compare(nan, nan.flip(0))
    assert found is not None
    assert (found.count, found.max_ulp) == (2, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_ulp_distance(dtype: torch.dtype) -> None:
    tiny = torch.zeros(1, dtype=dtype)
    bytes_of(tiny)[0] = 1
    one = torch.ones(1, dtype=dtype)
    inf = torch.tensor([math.inf], dtype=dtype)
    assert ulp_distance(tiny, -tiny).item() == 2
    assert ulp_distance(one, one + torch.finfo(dtype).eps).item() == 1
    assert ulp_distance(one, one * math.nan).item() == -1
    assert ulp_distance(-inf, inf).item() == ulp_distance(inf, -inf).item() > 2 ** (8 * one.element_size() - 2)


def test_the_first_coordinate_and_both_values() -> None:
    a = torch.arange(24.0).view(2, 3, 4)
    b = a.clone()
    b[1, 0, 2], b[1, 2, 3] = -1.0, 0.5
    found = compare(a, b)
    assert found is not None
    assert (found.count, found.of, found.index, found.expected, found.got) == (2, 24, (1, 0, 2), 14.0, -1.0)
    assert compare(a.mT, a.mT.contiguous()) is None
    with pytest.raises(ValueError, match="cannot compare"):
        compare(a, a.double())


def test_lengths_stand_beside_every_edge() -> None:
    lengths = edges(128, 2177)
    assert {1, 127, 128, 129, 1023, 1024, 1025, 2047, 2048, 2049, 2177} <= set(lengths)
    assert max(lengths) == 2177


# The command


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of targets that the command finds by name."""
    module = types.ModuleType("planted")
    module.plain, module.raising, module.broken = plain, raising, control("bounds")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "planted", module)


@pytest.mark.usefixtures("faults")
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("--target planted:plain --checks rerun", 0),
        ("--target planted:broken --checks bounds", 1),
        ("--target planted:raising --checks batch-size", 2),
        ("--target planted:plain --checks packed", 2),
        ("--target planted:plain --checks magic", 2),
        ("--target planted:missing", 2),
        ("--target missing_module:attention", 2),
        ("--target nothing", 2),
        ("--target sdpa --backend cpu", 2),
        ("--target sdpa-flash --device cpu", 2),
        ("--backend nothing", 2),
        ("--list", 0),
    ],
)
def test_exit_codes(arguments: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--no-backward", "--dtype", "float32", "--device", "cpu", *arguments.split()]) == code
    out, err = capsys.readouterr()
    assert ("VIOLATED" in out) == (code == 1)
    assert "\r" not in out + err  # the progress bar is for terminals
    if "magic" in arguments:
        assert "there are rerun" in err


def test_a_module_that_breaks_does_not_look_like_a_violation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "breaks.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    assert main(["audit", "--target", "breaks:attention", "--device", "cpu"]) == 2


def test_bad_arguments_exit_with_2() -> None:
    for arguments in ([], ["audit", "--dtype", "int8"], ["audit", "--wrong"]):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2


@pytest.mark.usefixtures("faults")
def test_json_holds_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    command = ["audit", "--target", "planted:broken", "--device", "cpu", "--checks", "lse-request,bounds", "--markdown"]
    assert main([*command, "--no-backward", "--json", str(file)]) == 1
    printed = capsys.readouterr().out
    document = json.loads(file.read_text())
    assert set(document) == {"schema", "target", "about", "verdict", "exit_code", "counts", "checks"}
    assert {"device", "dtype", "torch", "detattn", "seed", "date"} == set(document["about"])
    assert document["exit_code"] == 1
    assert document["counts"]["violated"] == 1
    bounds, lse_request = document["checks"]
    assert [(c["id"], c["status"]) for c in (bounds, lse_request)] == [("bounds", "violated"), ("lse-request", "holds")]
    assert set(bounds["tensors"][0]) >= {"tensor", "compared", "differing", "max_ulp", "first_case", "first_index"}
    assert "| `bounds` | violated |" in printed
    assert bounds["evidence"].replace("|", "\\|") in printed


def test_the_list_and_the_documents_show_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--list", "--markdown"]) == 0
    assert capsys.readouterr().out.strip() == checks_markdown()
    for c in CHECKS.values():
        assert f"| `{c.id}` | {c.text} |" in checks_markdown()
        assert c.control in checks_markdown()


def test_explain_names_every_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "paged attention on cpu" in out
    assert "reference" in out


def test_other_functions_are_audited_without_the_compiled_libraries() -> None:
    """The audit of another function must not need what this package builds."""
    code = """
import torch
torch.ops.load_library = lambda path: (_ for _ in ()).throw(OSError("not built"))
from pathlib import Path
Path.glob = lambda self, pattern: iter(())
import torch.nn.functional as F
from detattn.audit import audit
torch.set_num_threads(1)
def attention(q, k, v, causal, scale):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
report = audit(attention, checks=["rerun"], long=200)
assert report.exit_code == 0, report
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
