"""Asks vLLM's CPU build questions about images, one at a time. Run by `images.py --case vllm` in vLLM's environment.

    PYTHON benchmarks/images_vllm.py JOB.json OUT.json

JOB has "model" (a folder), "dtype", "threads", "tokens", "memory" (GiB of K/V) and "orders": {name: [{"prompt",
"image" (a path)}]}. OUT gets {order: {"latency": [seconds], "first": [seconds to the first token], "tokens": [how
many]}}.

SmolVLM's processor in transformers wants torchvision, which has no CPU build on the package index: the index's wheel is
one for CUDA. Its Python part does all that the processor needs, and is imported once the two operators of its compiled
part that it describes are declared.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

TORCHVISION = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    TORCHVISION.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": str(job["memory"]),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{job['threads'] - 1}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
    }
    import PIL.Image
    from vllm import LLM, SamplingParams

    llm = LLM(
        job["model"], dtype=job["dtype"], enable_prefix_caching=True, block_size=32, max_model_len=1024,
        limit_mm_per_prompt={"image": 1},
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=job["tokens"], temperature=0.2, seed=1, ignore_eos=True)
    found: dict[str, dict[str, list[float]]] = {}
    for order, questions in job["orders"].items():
        llm.reset_prefix_cache()
        llm.reset_mm_cache()
        out = found[order] = {"latency": [], "first": [], "tokens": []}
        for number, question in enumerate(questions):
            picture = PIL.Image.open(question["image"]).convert("RGB")
            started, first, ended = time.perf_counter(), None, None
            prompt: Any = {"prompt": question["prompt"], "multi_modal_data": {"image": picture}}
            # Not by `llm.enqueue`, which would tell of the last token only.
            llm.llm_engine.add_request(f"{order} {number}", prompt, sampling)
            while ended is None:
                for said in llm.llm_engine.step():
                    now = time.perf_counter() - started
                    first = now if first is None else first
                    ended = now if said.finished else None
            out["latency"].append(ended)
            out["first"].append(first)
            out["tokens"].append(len(said.outputs[0].token_ids))
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
