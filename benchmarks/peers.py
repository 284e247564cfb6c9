"""Run another system on the same prompts, in its own process: `python peers.py SYSTEM JOB.json`.

The script runs with any interpreter that has the system installed, and does not import prefold. It loads the model,
runs a few prompts as a warm-up, and prints {"version": "..."}. For every line of standard input it then runs once, with
empty caches, and prints {"seconds": ..., "found": ...}. An answer is one line of JSON. JOB has model (a Hugging Face
folder), dtype ("bfloat16" | "float32"), threads, block (vLLM), max_model_len, and one of prompts, cases and states:

    prompts   lists of token ids to score; `found` has a value or a list of values for each prompt. With `ids`: the
              log-probabilities of these ids (one list for all prompts, or one per prompt) at the last position. With
              `targets`: the summed log-probability of `targets[i]`, the last tokens of prompts[i]
    cases     {name: {"prompts": lists of token ids, "max_tokens": tokens of each output}}; a line of standard input
              names a case. Its prompts are continued greedily, past the end of text; `found` has the tokens of each
              output
    states    texts; transformers' pipeline answers `questions` ({name: question}) about each, one prompt at a time;
              `found` has the answers to each state

llama.cpp and OpenVINO read their weights from the file `gguf`.
"""

from __future__ import annotations

import json
import os
import sys
import time


def load_transformers(job):
    import torch
    import transformers

    torch.set_num_threads(job["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"])).eval()
    return model, transformers.__version__


def load_vllm(job, **options):
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(job.get("kv_gib", 4)))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{job['threads'] - 1}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm

    if job.get("block"):
        options["block_size"] = job["block"]
    model = vllm.LLM(
        job["model"],
        dtype=job["dtype"],
        enable_prefix_caching=True,
        max_model_len=job.get("max_model_len", 4096),
        **options,
    )
    return model, vllm.__version__


def padded(prompts, torch):
    """Return ids and mask of prompts padded on the left, so that the last position is the last token."""
    width = max(map(len, prompts))
    tokens = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return tokens, mask


def batches(prompts, size):
    """Return the indices of prompts in batches of `size` prompts with similar lengths."""
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    return [by_length[first : first + size] for first in range(0, len(by_length), size)]


def transformers_runner(job):
    import torch

    model, version = load_transformers(job)
    size = job.get("batch", 16)

    @torch.inference_mode()
    def run(prompts, ids, targets):
        values = [None] * len(prompts)
        for chosen in batches(prompts, size):
            tokens, mask = padded([prompts[i] for i in chosen], torch)
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

    return run, version


def vllm_runner(job):
    # Only the allowed ids count. Other ids may be more likely.
    llm, version = load_vllm(job, max_logprobs=128, logprobs_mode="processed_logprobs")
    import vllm

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
    return run, version


def transformers_generator(job):
    import torch

    model, version = load_transformers(job)
    model.generation_config.eos_token_id = None  # generate past it

    @torch.inference_mode()
    def run(prompts, max_tokens):
        found = [None] * len(prompts)
        for chosen in batches(prompts, job.get("batch", 16)):
            tokens, mask = padded([prompts[i] for i in chosen], torch)
            out = model.generate(
                input_ids=tokens, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
            )
            for row, i in enumerate(chosen):
                found[i] = out[row, tokens.shape[1] :].tolist()
        return found

    return run, version


def vllm_generator(job):
    llm, version = load_vllm(job)
    import vllm

    def run(prompts, max_tokens):
        params = vllm.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    run.reset = llm.reset_prefix_cache
    return run, version


def load_llama(job, room, sequences):
    """Load the file `gguf` in llama.cpp. Return its module, its K/V memory, and a function that runs rows.

    The function gets rows (token, position, sequence, is_read), and returns the logits of the read rows.
    """
    import llama_cpp as llama
    import numpy as np

    silent = llama.llama_log_callback(lambda level, text, data: None)
    llama.llama_log_set(silent, None)
    llama.llama_backend_init()
    options = llama.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch, options.n_seq_max = room + 256, 2048, 512, sequences
    options.n_threads = options.n_threads_batch = job["threads"]
    options.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_ENABLED
    options.kv_unified = True
    loading = llama.llama_model_default_params()
    loading.use_extra_bufts = False  # with AMX, version 0.3.36 crashes on an illegal instruction (Q8_0)
    model = llama.llama_model_load_from_file(job["gguf"].encode(), loading)
    context = llama.llama_init_from_model(model, options)
    vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    batch = llama.llama_batch_init(2048, 0, 1)

    def step(rows):
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, is_read) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, is_read
        if llama.llama_decode(context, batch):
            raise RuntimeError("llama.cpp has no K/V memory for the batch")
        logits = [llama.llama_get_logits_ith(context, i) for i, row in enumerate(rows) if row[3]]
        return [np.ctypeslib.as_array(one, (vocabulary,)) for one in logits]

    step.silent = silent  # keep a reference, because llama.cpp calls it
    return llama, llama.llama_get_memory(context), step


def llama_runner(job):
    """Score sorted prompts in llama.cpp, with `ids` only. A prompt reuses K/V that it shares with the last."""
    import numpy as np

    room = max(map(len, job["prompts"]))
    llama, memory, step = load_llama(job, room, 1)

    def run(prompts, ids, targets):
        values, before = [None] * len(prompts), []
        llama.llama_memory_clear(memory, True)
        for i in sorted(range(len(prompts)), key=prompts.__getitem__):
            prompt = prompts[i]
            shared = next((at for at, (a, b) in enumerate(zip(prompt, before, strict=False)) if a != b), len(before))
            shared = min(shared, len(prompt) - 1)
            llama.llama_memory_seq_rm(memory, 0, shared, -1)
            rows = [(token, at, 0, at + 1 == len(prompt)) for at, token in enumerate(prompt) if at >= shared]
            for first in range(0, len(rows), 2048):
                read = step(rows[first : first + 2048])
            logits = read[0].astype(np.float64)
            logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
            values[i], before = logprobs[ids[i]].tolist(), prompt
        return values

    return run, llama.__version__


def llama_generator(job):
    """Generate with llama.cpp's batches: all prompts, then steps with one token per sequence."""
    cases = job["cases"].values()
    most = max(len(case["prompts"]) for case in cases)
    room = max(sum(len(prompt) + case["max_tokens"] for prompt in case["prompts"]) for case in cases)
    llama, memory, step = load_llama(job, room, most)

    def likeliest(rows):
        return [int(logits.argmax()) for logits in step(rows)]

    def run(prompts, max_tokens):
        llama.llama_memory_clear(memory, True)
        rows = [(token, at, i, at + 1 == len(p)) for i, p in enumerate(prompts) for at, token in enumerate(p)]
        last = [token for first in range(0, len(rows), 2048) for token in likeliest(rows[first : first + 2048])]
        found = [[token] for token in last]
        for number in range(max_tokens - 1):
            last = likeliest([(token, len(prompts[i]) + number, i, True) for i, token in enumerate(last)])
            for tokens, token in zip(found, last, strict=True):
                tokens.append(token)
        return found

    return run, llama.__version__


def openvino_generator(job):
    """Generate with OpenVINO GenAI's batches. It multiplies in int8 if weights have blocks of at most 8 bits."""
    import numpy as np
    import openvino
    import openvino_genai

    cases = job["cases"].values()
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_batched_tokens = job.get("kv_gib", 4), 4096
    scheduler.max_num_seqs = max(len(case["prompts"]) for case in cases)
    scheduler.enable_prefix_caching = False  # runs share no prompts
    options = {"scheduler_config": scheduler, "INFERENCE_NUM_THREADS": job["threads"]}
    pipeline = openvino_genai.LLMPipeline(job["gguf"], "CPU", **options)
    config = openvino_genai.GenerationConfig()
    config.ignore_eos, config.do_sample = True, False

    def run(prompts, max_tokens):
        config.max_new_tokens = max_tokens
        ids = np.array(prompts, np.int64)  # all prompts have one length
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        return [list(map(int, tokens)) for tokens in pipeline.generate(inputs, config).tokens]

    return run, openvino_genai.__version__


def decider(system, job):
    """Return a function that runs transformers' pipeline for decisions, and the version."""
    import torch
    import transformers

    torch.set_num_threads(job["threads"])
    dtype = getattr(torch, job["dtype"])
    pipe = transformers.pipeline("decision", model=job["model"], device="cpu", dtype=dtype)
    questions = job["questions"]

    def run(line):
        return [pipe({"state": state, "questions": questions}) for state in job["states"]]

    pipe({"state": job["states"][0], "questions": dict([next(iter(questions.items()))])})  # warm-up
    return run, None, transformers.__version__


def scorer(system, job):
    """Return a function that runs the prompts of JOB, whatever the line, and the version."""
    run, version = {"transformers": transformers_runner, "vllm": vllm_runner, "llama": llama_runner}[system](job)
    prompts, ids, targets = job["prompts"], job.get("ids"), job.get("targets")
    if ids is not None and not isinstance(ids[0], list):
        ids = [ids] * len(prompts)
    run(prompts[:8], ids and ids[:8], targets and targets[:8])  # warm-up
    return lambda line: run(prompts, ids, targets), getattr(run, "reset", None), version


def generator(system, job):
    """Return a function that runs the case named by a line, and the version."""
    systems = {
        "transformers": transformers_generator,
        "vllm": vllm_generator,
        "llama": llama_generator,
        "openvino": openvino_generator,
    }
    run, version = systems[system](job)
    cases = job["cases"]
    run(next(iter(cases.values()))["prompts"][:8], 4)  # warm-up
    return lambda name: run(cases[name]["prompts"], cases[name]["max_tokens"]), getattr(run, "reset", None), version


def main():
    system, job_file = sys.argv[1:]
    with open(job_file) as f:
        job = json.load(f)
    # Libraries print to standard error, so that standard output has only answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**content):
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    start = decider if "states" in job else scorer if "prompts" in job else generator
    run, reset, version = start(system, job)
    answer(version=version)
    for line in sys.stdin:
        if reset:
            reset()
        started = time.perf_counter()
        found = run(line.strip())
        answer(seconds=time.perf_counter() - started, found=found)


if __name__ == "__main__":
    main()
