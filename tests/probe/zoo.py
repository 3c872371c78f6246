"""Program of the tests: one tiny model after the other in an in-process vLLM; prints one JSON line per family.

Usage: zoo.py TOKENIZER_FOLDER WORK_FOLDER FAMILY...
"""

import gc
import hashlib
import json
import sys
import traceback
import uuid
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

TEXTS = [
    "The quick brown fox jumps over the lazy dog and runs away from the old grey wolf in the woods.",
    "To sort a list in Python, call sorted(xs), which returns a new list.",
]
ALPHAS = [0.0, 0.5]


def examine(folder: Path) -> dict[str, Any]:
    """Everything that the test compares with Hugging Face."""
    import torch
    from tiny import BACKEND
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(
        str(folder),
        enforce_eager=True,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
        # Profiling images and the like is not what is tested.
        disable_log_stats=True,
        attention_backend=BACKEND.get(folder.name),
    )
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    tokenizer = llm.get_tokenizer()
    sequences = [tokenizer(text)["input_ids"] for text in TEXTS]

    def call(operation: str, **payload: Any) -> Any:
        (reply,) = llm.collective_rpc("flipwatch_rpc", args=(uuid.uuid4().hex, operation, payload))
        return reply["result"] if reply["ok"] else {"refused": reply["detail"]}

    def served() -> list[list[float]]:
        # One at a time: the batch must not differ between runs.
        outputs = [llm.generate([TokensPrompt(prompt_token_ids=s)], sampling, use_tqdm=False)[0] for s in sequences]
        return [
            [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], tokens[1:], strict=True)]
            for output, tokens in zip(outputs, sequences, strict=True)
        ]

    def measure(monitor: str, plan: dict[str, Any]) -> Any:
        opened = call("open", id="m", monitor=monitor, plan=plan)
        if "refused" in opened:
            return opened
        while True:
            progress = call("advance", id="m", steps=50)
            if "refused" in progress or progress["reading"] is not None:
                return progress.get("reading", progress)

    def kv_digest() -> str:
        from flipwatch.probe import armed

        assert armed.served is not None
        digest = hashlib.sha256()
        for layer in armed.served.vllm_config.compilation_config.static_forward_context.values():
            cache = getattr(layer, "kv_cache", None)
            for tensor in cache if isinstance(cache, list | tuple) else [cache]:
                if tensor is not None:
                    digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    def blocks_alone() -> dict[str, Any]:
        """Against the checkpoint and against recorded states, healthy and with a fault in block 3."""
        small = {"tokens": sequences, "prefix": 8, "size": 8}
        record = {**small, "noise": True}
        recorded = measure("differential", record)
        if "refused" in recorded:
            return dict(recorded)
        replay = {**small, "inputs": recorded["ranks"][0]["inputs"], "inputs_dtype": recorded["dtype"]}
        against = {**record, "checkpoint": True}
        readings = {"plan": record, "recorded": recorded}
        readings |= {"healthy": measure("differential", replay), "clean": measure("differential", against)}
        (name, _), *_ = [named for named in find_weights(3) if named[1].dim() > 1]
        fault = call("add_fault", id="f", order={"block": 3, "tensor": name, "kind": "burst", "count": 64})
        readings |= {
            "fault": fault,
            "faulty": measure("differential", replay),
            "found": measure("differential", against),
        }
        call("remove_fault", id="f")
        return {**readings, "bytes": measure("fingerprint", {"steps": 1})["ranks"][0]}

    def find_weights(block: int) -> list[tuple[str, Any]]:
        from flipwatch.probe import armed

        assert armed.served is not None
        return list(armed.served.stack.layers[block].named_parameters())

    facts = call("facts")
    result: dict[str, Any] = {"facts": facts, "sequences": sequences, "served": served()}
    if facts["refusal"] is None:
        result["self_test"] = measure("self_test", {})
        for block in (0, 3):
            call("set_gates", gates=[[block, 0.0]])
            result[f"skip_{block}"] = served()
            call("set_gates", gates=[[block, 1.0]])
        plan = {"alphas": ALPHAS, "tokens": sequences, "scored_from": [1, 1], "tokens_per_step": 64}
        digest, gates = kv_digest(), call("facts")["gates"]
        result["scan"] = measure("alpha_scan", plan)
        result["untouched"] = kv_digest() == digest and call("facts")["gates"] == gates
        result["alone"] = blocks_alone()
        result["one_sequence"] = measure("alpha_scan", {**plan, "tokens": sequences[:1], "scored_from": [1]})
    result["again"] = served()
    return result


def main() -> None:
    """One line per family; a family that fails says so in its line."""
    from tiny import make
    from vllm.distributed import cleanup_dist_env_and_memory

    tokenizer, work = Path(sys.argv[1]), Path(sys.argv[2])
    for family in sys.argv[3:]:
        try:
            result = examine(make(family, tokenizer, work / family))
        except Exception:
            result = {"error": traceback.format_exc()}
        print("ZOO " + json.dumps({"family": family, **result}), flush=True)
        gc.collect()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
