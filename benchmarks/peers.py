"""Other systems on the same prompts, each in a process of its own: `python peers.py SYSTEM JOB.json OUT.json`.

Runs under any interpreter that has the system installed; imports nothing of prefold. JOB holds

    model     a Hugging Face folder; dtype "bfloat16" | "float32"; threads; block (vLLM)
    prompts   lists of token ids
    wanted    "last": log-probabilities of the ids in `ids` (one list for all, or one a prompt) at the last position
              "targets": summed log-probability of `targets[i]`, the last tokens of prompts[i]
    repeats   timed runs; before them one warm-up on a few prompts

OUT receives {"seconds": [...], "values": [...], "version": "..."}. Loading the model is not timed.
"""

from __future__ import annotations

import json
import os
import sys
import time


def transformers_runner(job):
    import torch
    import transformers

    torch.set_num_threads(job["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"])).eval()
    size = job.get("batch", 16)

    @torch.inference_mode()
    def run(prompts, ids, targets):
        values = [None] * len(prompts)
        by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for first in range(0, len(by_length), size):
            chosen = by_length[first : first + size]
            width = max(len(prompts[i]) for i in chosen)
            tokens = torch.zeros(len(chosen), width, dtype=torch.long)
            mask = torch.zeros(len(chosen), width, dtype=torch.long)
            for row, i in enumerate(chosen):  # padded on the left, so that the last position is the last token
                tokens[row, width - len(prompts[i]) :] = torch.tensor(prompts[i])
                mask[row, width - len(prompts[i]) :] = 1
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            keep = 1 if targets is None else 1 + max(len(targets[i]) for i in chosen)
            logits = model(
                input_ids=tokens, attention_mask=mask, position_ids=positions, logits_to_keep=keep, use_cache=False
            ).logits.float()
            logprobs = logits.log_softmax(-1)
            for row, i in enumerate(chosen):
                if targets is None:
                    values[i] = logprobs[row, -1, ids[i]].tolist()
                else:
                    m = len(targets[i])
                    read = logprobs[row, keep - 1 - m : keep - 1]
                    values[i] = read.gather(-1, torch.tensor(targets[i])[:, None]).sum().item()
        return values

    return run, transformers.__version__


def vllm_runner(job):
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{job['threads'] - 1}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm

    options = {"block_size": job["block"]} if job.get("block") else {}
    llm = vllm.LLM(
        job["model"],
        dtype=job["dtype"],
        enable_prefix_caching=True,
        max_model_len=job.get("max_model_len", 4096),
        max_logprobs=128,
        # Of the allowed ids only: the raw ones need not be among the best.
        logprobs_mode="processed_logprobs",
        **options,
    )

    def run(prompts, ids, targets):
        if targets is None:
            params = [
                vllm.SamplingParams(
                    max_tokens=1, temperature=0.0, logprobs=len(ids[i]), allowed_token_ids=sorted(set(ids[i]))
                )
                for i in range(len(prompts))
            ]
        else:
            params = vllm.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        values = []
        for i, output in enumerate(outputs):
            if targets is None:
                found = output.outputs[0].logprobs[0]
                values.append([found[t].logprob if t in found else float("-inf") for t in ids[i]])
            else:
                m = len(targets[i])
                read = output.prompt_logprobs[-m:]
                values.append(sum(p[t].logprob for p, t in zip(read, targets[i], strict=True)))
        return values

    def reset():
        llm.reset_prefix_cache()

    run.reset = reset
    return run, vllm.__version__


def main():
    system, job_file, out_file = sys.argv[1:]
    with open(job_file) as f:
        job = json.load(f)
    run, version = {"transformers": transformers_runner, "vllm": vllm_runner}[system](job)
    prompts, ids, targets = job["prompts"], job.get("ids"), job.get("targets")
    if ids is not None and not isinstance(ids[0], list):
        ids = [ids] * len(prompts)
    warm = slice(0, 8)
    run(prompts[warm], ids and ids[warm], targets and targets[warm])
    seconds, values = [], None
    for _ in range(job.get("repeats", 1)):
        if hasattr(run, "reset"):
            run.reset()
        started = time.perf_counter()
        values = run(prompts, ids, targets)
        seconds.append(time.perf_counter() - started)
    with open(out_file, "w") as f:
        json.dump({"seconds": seconds, "values": values, "version": version}, f)


if __name__ == "__main__":
    main()
