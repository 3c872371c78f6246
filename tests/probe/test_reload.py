"""Fresh values from the checkpoint in a real vLLM: run as a program, this file does what its tests then judge.

Usage of the program: test_reload.py WORK_FOLDER, which prints one JSON line per case.
"""

import gc
import json
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from tiny import BACKEND, FAMILIES
else:
    from ..vllm_server import vllm_environment
    from .tiny import BACKEND, FAMILIES

VOCABULARY = 500
"""No multiple of 64: vLLM pads the embedding."""
TOKENS = [3, 141, 59, 265, 358, 97, 93, 238]


class Served:
    """One tiny model in a vLLM of this process."""

    def __init__(self, family: str, folder: Path, **changes: Any) -> None:
        import torch
        import transformers
        from vllm import LLM

        from flipwatch.probe import armed

        torch.manual_seed(0)
        config_class, arguments = FAMILIES[family]
        config = getattr(transformers, config_class)(
            **{**arguments, "vocab_size": VOCABULARY, "num_hidden_layers": 3, **changes}
        )
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder, max_shard_size="2MB")
        self.folder = folder
        self.llm = LLM(
            str(folder),
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=128,
            max_num_seqs=2,
            max_num_batched_tokens=128,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            attention_backend=BACKEND.get(family),
        )
        assert armed.served is not None
        self.model, self.config, self.stack = armed.served.model, armed.served.vllm_config, armed.served.stack
        self.before = {name: tensor.detach().clone() for name, tensor in self.tensors().items()}
        self.places = self.where()

    def tensors(self) -> dict[str, Any]:
        """All parameters and buffers by all their names."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        return parameters | dict(self.model.named_buffers(remove_duplicate=False))

    def where(self) -> dict[str, tuple[int, int]]:
        """Which objects the tensors are and where their memory is."""
        return {name: (id(tensor), tensor.data_ptr()) for name, tensor in self.tensors().items()}

    def changed(self) -> list[str]:
        """Tensors whose bits are not those of the load; a second name of one counts too."""
        return [name for name, tensor in self.tensors().items() if not same(tensor, self.before[name])]

    def answer(self) -> list[float]:
        """Log-probabilities of what it generates."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        sampling = SamplingParams(max_tokens=6, temperature=0, logprobs=0, detokenize=False)
        (output,) = self.llm.generate([TokensPrompt(prompt_token_ids=TOKENS)], sampling, use_tqdm=False)
        return [entry.logprob for step in output.outputs[0].logprobs for entry in step.values()]

    def damage(self, name: str, seed: int = 0) -> Callable[[], None]:
        """Flip bits of 18 values; the returned function takes it back."""
        from flipwatch.monitors.faults import FaultKind, FaultSpec, inject

        return inject(FaultSpec(kind=FaultKind.BIT, seed=seed), self.tensors()[name])

    def fresh(self, *names: str) -> Any:
        """Fresh tensors, or the sentence of the refusal."""
        from flipwatch.probe.fresh import fresh_tensors

        return refused(lambda: fresh_tensors(self.model, self.config, self.stack, list(names)))

    def refusal(self, *names: str) -> str | list[str]:
        """The sentence of the refusal, or the names that were had after all."""
        found = self.fresh(*names)
        return found if isinstance(found, str) else list(found)

    def compared(self) -> Any:
        """What `differing` says of all blocks together, or the sentence of the refusal."""
        from flipwatch.probe.fresh import differing

        found = refused(lambda: list(differing(self.model, self.config, self.stack)))
        if isinstance(found, str):
            return found
        merged: dict[str, Any] = {
            "blocks": [part.block for part in found],
            "equal": [n for p in found for n in p.equal],
        }
        for key in ("different", "unfilled", "not_comparable"):
            merged[key] = {name: value for part in found for name, value in getattr(part, key).items()}
        return merged

    def reload(self, module: str) -> str | None:
        """The sentence of the refusal, if there is one."""
        from flipwatch.probe.reload import reload_module

        return refused(lambda: reload_module(self.model, self.config, module))


def refused(do: Callable[[], Any]) -> Any:
    """What it returns, or why the checkpoint was of no use."""
    from flipwatch.probe.checkpoint import CheckpointUnusable

    try:
        return do()
    except CheckpointUnusable as reason:
        return str(reason)


def same(one: Any, other: Any) -> bool:
    """Equal bit for bit, shape and type."""
    import torch

    from flipwatch.monitors.faults.bits import bits

    return one.dtype == other.dtype and torch.equal(bits(one.detach()), bits(other.detach()))


@contextmanager
def rewritten(folder: Path, change: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """The checkpoint with other tensors, each file on its own; afterwards as it was."""
    from safetensors.torch import load_file, save_file

    before = {file: file.read_bytes() for file in folder.glob("*.safetensors")}
    try:
        for file in before:
            tensors = load_file(file)
            change(tensors)
            save_file(tensors, file)
        yield
    finally:
        for file, content in before.items():
            file.write_bytes(content)


# --- the cases ----------------------------------------------------------------------------------------------------

QKV, NORM, EMBEDDING = (
    "model.layers.1.self_attn.qkv_proj.weight",
    "model.layers.2.input_layernorm.weight",
    "model.embed_tokens.weight",
)


def plain(work: Path) -> dict[str, Any]:
    """A Llama with fused projections, a tied head and padding, all weights plain."""
    served = Served("llama", work, tie_word_embeddings=True)
    result: dict[str, Any] = {
        "files": len(list(work.glob("*.safetensors"))),
        "padded": served.before[EMBEDDING].shape[0] > VOCABULARY,
        "parameters": sorted(name for name, _ in served.model.named_parameters()),
        "clean": served.compared(),
    }
    for name in (QKV, NORM, EMBEDDING):
        undo = served.damage(name)
        bad = served.tensors()[name].detach().clone()
        fresh = served.fresh(name)
        result[name] = {
            "compared": served.compared(),
            "changed": served.changed(),
            "fresh": list(fresh),
            "right": same(fresh[name], served.before[name]),
            "strides": fresh[name].stride() == bad.stride(),
            "untouched": same(served.tensors()[name], bad) and not same(bad, served.before[name]),
            "in_place": served.where() == served.places,
        }
        undo()
    undo = served.damage("lm_head.weight")
    fresh = served.fresh("lm_head.weight", QKV, "model.layers.1.self_attn.attn._k_scale", "model.layers.1.no.such")
    result["several"] = {name: same(tensor, served.before[name]) for name, tensor in fresh.items()}
    undo()
    result["none"] = [
        served.refusal("model.layers.1.self_attn.attn._k_scale"),
        served.refusal("no.such"),
        served.refusal(),
    ]
    result["other_files"] = other_files(served)
    result["reload_tied"] = served.reload("lm_head")
    result["reload_unknown"] = served.reload("no.such")
    answer = served.answer()
    undo = served.damage(QKV)
    damaged = served.answer()
    result["reload"] = served.reload(QKV.removesuffix(".weight"))
    result["reloaded"] = {
        "changed": served.changed(),
        "in_place": served.where() == served.places,
        "noticed": damaged != answer,
        "answers": served.answer() == answer,
    }
    return result


def other_files(served: Served) -> dict[str, Any]:
    """What is said when the files are not those that the model was loaded from."""
    up = "model.layers.2.mlp.up_proj.weight"
    result = {}

    def change_one(tensors: dict[str, Any]) -> None:
        if up in tensors:
            tensors[up][3, 5] = 7.0

    def leave_out_k(tensors: dict[str, Any]) -> None:
        tensors.pop("model.layers.1.self_attn.k_proj.weight", None)

    def other_shape(tensors: dict[str, Any]) -> None:
        if up in tensors:
            tensors[up] = tensors[up][:-1].contiguous()

    with rewritten(served.folder, change_one):
        result["one_value"] = served.compared()
    with rewritten(served.folder, leave_out_k):
        result["no_k"] = served.compared()
        # What the files do not hold stays as it is, damaged or not.
        undo = served.damage(QKV)
        result["no_k_fresh_right"] = same(served.fresh(QKV)[QKV], served.before[QKV])
        undo()
        result["no_k_reload"] = served.reload(QKV.removesuffix(".weight"))
    with rewritten(served.folder, other_shape):
        result["shape"] = served.compared()
        result["shape_fresh"] = served.refusal("model.layers.2.mlp.gate_up_proj.weight")
        result["shape_reload"] = served.reload("model.layers.2.mlp.gate_up_proj")
    with rewritten(served.folder, lambda tensors: None):
        file = max(served.folder.glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-1000])
        result["cut"] = [served.compared(), served.refusal(NORM), served.reload("model.norm")]
    moved = served.folder.rename(served.folder.with_name("moved"))
    result["moved"] = [served.compared(), served.refusal(NORM), served.reload("model.norm")]
    moved.rename(served.folder)
    result["changed"], result["in_place"] = served.changed(), served.where() == served.places
    result["compared"] = served.compared()
    return result


def experts(work: Path) -> dict[str, Any]:
    """A mixture of experts; the CPU's packing of the experts is left out, so that they lie as on a GPU."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    from flipwatch.probe import fresh

    def keep(weight: Any, isa: str) -> Any:
        return weight

    original, plain_backends = cpu_moe.cpu_prepack_moe_weight, fresh._PLAIN_EXPERTS
    cpu_moe.cpu_prepack_moe_weight = keep
    try:
        served = Served("qwen3_moe", work)
        name = next(n for n in served.before if n.endswith("1.mlp.experts.routed_experts.w13_weight"))
        result: dict[str, Any] = {"name": name, "rearranged": served.refusal(name)}
        fresh._PLAIN_EXPERTS = {*plain_backends, "CPU"}
        result["clean"] = served.compared()
        undo = served.damage(name)
        result["compared"] = served.compared()
        result["right"] = same(served.fresh(name)[name], served.before[name])
        undo()
        return {**result, "changed": served.changed(), "in_place": served.where() == served.places}
    finally:
        cpu_moe.cpu_prepack_moe_weight, fresh._PLAIN_EXPERTS = original, plain_backends


def latent(work: Path) -> dict[str, Any]:
    """Multi-head latent attention, which derives two matrices from a projection."""
    import torch

    served = Served("deepseek_v2", work, num_hidden_layers=2)
    projection = "model.layers.1.self_attn.kv_b_proj"
    derived = next(name for name in served.before if name.startswith("model.layers.1.") and name.endswith(".W_UK_T"))
    # Here it is a view of the projection; of a quantised one it has memory of its own.
    owner = served.model.get_submodule(derived.removesuffix(".W_UK_T"))
    owner.W_UK_T = torch.nn.Parameter(owner.W_UK_T.detach().clone(), requires_grad=False)
    served.places = served.where()
    result: dict[str, Any] = {"clean": served.compared(), "derived": derived}
    served.damage(f"{projection}.weight")
    served.damage(derived)
    result["damaged"] = served.changed()
    result["reload"] = served.reload(projection)
    return {**result, "changed": served.changed(), "in_place": served.where() == served.places}


def packed(work: Path) -> dict[str, Any]:
    """A Llama whose Linear weights the CPU build packs where no tensor shows them."""
    import torch
    from vllm.model_executor.layers import utils

    served = Served("llama", work, tie_word_embeddings=True)
    result: dict[str, Any] = {"clean": served.compared(), "answer": served.answer()}
    inputs = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    for part in ("self_attn.qkv_proj", "mlp.gate_up_proj"):
        name = f"model.layers.1.{part}"
        module = served.model.get_submodule(name)
        weight = module.weight

        def output(module: Any = module) -> torch.Tensor:
            with torch.inference_mode():
                return module(inputs)[0]

        before = output()
        # The packed copy of other values, as damage in it would leave it.
        bad = torch.full((module.output_size_per_partition, 256), 0.5, dtype=torch.bfloat16)
        module.weight = torch.nn.Parameter(bad, requires_grad=False)
        utils.dispatch_cpu_unquantized_gemm(module, remove_weight=True)
        module.weight = weight
        damaged, wrong = output(), served.answer()
        hole = f"{name.rpartition('.')[0]}.{'k' if 'qkv' in part else 'up'}_proj.weight"
        with rewritten(work, lambda tensors, hole=hole: tensors.pop(hole, None)):  # type: ignore[misc]
            no_part = served.reload(name)
        left_alone = same(output(), damaged)
        result[part] = {
            "packed": weight.numel() == 0,
            "fresh": served.refusal(f"{name}.weight"),
            "noticed": not same(damaged, before) and wrong != result["answer"],
            "no_part": no_part,
            "left_alone": left_alone,
            "reload": served.reload(name),
            "right": same(output(), before),
            "answers": served.answer() == result["answer"],
            "changed": served.changed(),
            "in_place": served.where() == served.places,
        }
    return result


def main() -> None:
    """All cases, one line each; one that fails says so in its line."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.layers import utils

    # Before the plugin replaces it.
    packing = utils.dispatch_cpu_unquantized_gemm
    for case in (plain, experts, latent, packed):
        if case is packed:
            utils.dispatch_cpu_unquantized_gemm = packing
        try:
            result = case(Path(sys.argv[1]) / case.__name__)
        except Exception:
            result = {"error": traceback.format_exc()}
        print("CASE " + json.dumps({"case": case.__name__, **result}), flush=True)
        gc.collect()
        cleanup_dist_env_and_memory()


# --- the tests ----------------------------------------------------------------------------------------------------

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Results of all cases, from one process."""
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path_factory.mktemp("reload"))],
        env=vllm_environment(VLLM_ENABLE_V1_MULTIPROCESSING="0"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line.removeprefix("CASE ") for line in done.stdout.splitlines() if line.startswith("CASE ")]
    assert len(lines) == 4, done.stdout[-2000:] + done.stderr[-2000:]
    return {entry["case"]: entry for entry in map(json.loads, lines)}


def of(cases: dict[str, dict[str, Any]], case: str) -> dict[str, Any]:
    """The result of one case, which must have run."""
    assert "error" not in cases[case], cases[case]["error"]
    return cases[case]


def test_a_model_as_loaded_equals_its_checkpoint(cases: dict[str, dict[str, Any]]) -> None:
    """Every parameter, fused and tied and padded ones too; block by block, then the rest."""
    result = of(cases, "plain")
    assert result["files"] > 1
    assert result["padded"]
    clean = result["clean"]
    assert clean["blocks"] == [0, 1, 2, None]
    assert sorted(clean["equal"]) == result["parameters"]
    assert (clean["different"], clean["unfilled"]) == ({}, {})
    # vLLM's own scales, which no checkpoint of a model like this has.
    assert all(name.endswith("_scale") for name in clean["not_comparable"])


@pytest.mark.parametrize("name", [QKV, NORM, EMBEDDING])
def test_fresh_values_are_those_of_the_load(name: str, cases: dict[str, dict[str, Any]]) -> None:
    """Bit for bit, while the damaged memory stays as it is and where it is, and only this tensor is named."""
    result = of(cases, "plain")[name]
    assert result["fresh"] == [name]
    assert result["right"]
    assert result["strides"]
    assert result["untouched"]
    assert result["in_place"]
    assert result["compared"]["different"] == {name: 18}
    assert sorted([*result["compared"]["equal"], name]) == of(cases, "plain")["parameters"]
    assert result["changed"] == ([name, "lm_head.weight"] if name == EMBEDDING else [name])


def test_names_that_cannot_be_had_are_left_out(cases: dict[str, dict[str, Any]]) -> None:
    """Of several names those that can; a tied head is its embedding; none at all is refused with the reason."""
    result = of(cases, "plain")
    assert result["several"] == {"lm_head.weight": True, QKV: True}
    scale, unknown, nothing = result["none"]
    assert scale == "model.layers.1.self_attn.attn._k_scale: No tensor of the checkpoint fills it."
    assert unknown == "no.such: It is no parameter and no buffer that a checkpoint holds."
    assert nothing == "No tensor was asked for."


def test_other_files_than_those_of_the_load(cases: dict[str, dict[str, Any]]) -> None:
    """Another value is named; a missing part shows as unfilled; another shape, a cut file and a moved one are told."""
    result = of(cases, "plain")["other_files"]
    fused = "model.layers.2.mlp.gate_up_proj.weight"
    assert result["one_value"]["different"] == {fused: 1}
    assert (result["no_k"]["different"], result["no_k"]["unfilled"]) == ({}, {QKV: 4 * 32 * 256})
    assert not result["no_k_fresh_right"]
    assert "does not fill" in result["no_k_reload"]
    assert "cannot load the checkpoint's tensors again" in result["shape"]["not_comparable"][fused]
    assert NORM in result["shape"]["not_comparable"]
    assert len(result["shape"]["equal"]) > 8
    assert "cannot load the checkpoint's tensors again" in result["shape_fresh"]
    assert "cannot load model.layers.2.mlp.gate_up_proj anew" in result["shape_reload"]
    assert all("is cut off" in said for said in result["cut"])
    assert all("is neither a folder nor in the local hub cache" in said for said in result["moved"])
    # Whatever was tried, the memory is as it was, and so is what is said of it.
    assert (result["changed"], result["in_place"]) == ([], True)
    assert result["compared"] == of(cases, "plain")["clean"]


def test_a_plain_module_is_loaded_anew_in_place(cases: dict[str, dict[str, Any]]) -> None:
    """The damaged projection has its bits back at the same place, nothing else moved, and the answers are the old
    ones; a module that shares its tensor and one that does not exist are refused."""
    result = of(cases, "plain")
    assert result["reload"] is None
    assert result["reloaded"] == {"changed": [], "in_place": True, "noticed": True, "answers": True}
    assert "shares a tensor with another module" in result["reload_tied"]
    assert "has no module 'no.such'" in result["reload_unknown"]


def test_experts(cases: dict[str, dict[str, Any]]) -> None:
    """The fused experts come from many tensors of the checkpoint; a backend that rearranges them is told."""
    result = of(cases, "experts")
    name = result["name"]
    assert "The CPU backend rearranges the experts" in result["rearranged"]
    assert name in result["clean"]["equal"]
    assert result["clean"]["different"] == {}
    assert result["compared"]["different"] == {name: 18}
    assert result["right"]
    assert (result["changed"], result["in_place"]) == ([], True)


def test_derived_matrices_follow_their_projection(cases: dict[str, dict[str, Any]]) -> None:
    """What MLA derives is not compared, but is derived again, in place, when its projection is loaded anew."""
    result = of(cases, "latent")
    assert "made after the checkpoint was loaded" in result["clean"]["not_comparable"][result["derived"]]
    assert result["clean"]["different"] == {}
    assert result["derived"] in result["damaged"]
    assert len(result["damaged"]) >= 2
    assert result["reload"] is None
    assert (result["changed"], result["in_place"]) == ([], True)


@pytest.mark.parametrize("part", ["self_attn.qkv_proj", "mlp.gate_up_proj"])
def test_packed_weights_are_loaded_anew(part: str, cases: dict[str, dict[str, Any]]) -> None:
    """No tensor shows them, so they are neither compared nor fresh; loaded anew, the outputs are the old bits.  A
    checkpoint that lacks a part is refused, and the module computes as before."""
    result = of(cases, "packed")[part]
    name = f"model.layers.1.{part}.weight"
    assert result["packed"]
    assert "packed form" in of(cases, "packed")["clean"]["not_comparable"][name]
    assert "packed form" in result["fresh"]
    assert result["noticed"]
    assert "does not fill" in result["no_part"]
    assert result["left_alone"]
    assert result["reload"] is None
    assert result["right"]
    assert result["answers"]
    assert (result["changed"], result["in_place"]) == ([], True)


if __name__ == "__main__":
    main()
