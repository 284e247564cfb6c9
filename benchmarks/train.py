"""Times a training step with and without sharing, on completions of one prompt; forward, backward and optimizer apart.

    python benchmarks/train.py [--model smollm2-135m] [--completions 16] [--prompt 576] [--completion 64] [--json FILE]

Random weights of a real geometry, float32, plain cross entropy of the completions, AdamW. Systems: prefold's three
modes (and with --recompute each with its layers computed again in the backward pass), and transformers on the same
sequences in one padded batch, sdpa attention, logits of the completions only. Each runs in a process of its own, so
that its peak memory is its own: what a step takes beyond weights, gradients and optimizer state. The FLOP ratio counts
three times the forward pass: linears on rows, attention over visible pairs, the head where it is read.

Then the losses of 100 steps with and without sharing, on a small model, and how far apart they come.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable

import numpy as np
import torch
from common import attention_flops, machine, median, spread, table, visible_pairs, write_json

from prefold.checkpoint import Checkpoint, resolve
from prefold.model import config_from, load_model
from prefold.train import TrainBatch, logprobs, sft_loss

SMALL = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"intermediate_size": 256, "vocab_size": 512}


def make_sequences(options: argparse.Namespace, vocab: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, vocab, options.prompt)
    return [np.concatenate((prompt, rng.integers(0, vocab, options.completion))) for _ in range(options.completions)]


def step_flops(batch: TrainBatch) -> float:
    """Of forward and backward: the backward pass has twice the products of the forward pass."""
    config, step, reads = batch.config, batch.step, len(batch.step.read_rows)
    layer, kv = config.linear_flops / len(config.planes), 4 * config.hidden * config.kv_size
    linear = batch.num_rows * (layer * (len(config.planes) - 1) + kv) + reads * (layer - kv)
    attention = (len(config.planes) - 1) * attention_flops(config, visible_pairs(step.end))
    return 3 * (linear + attention + reads * 2 * config.hidden * config.vocab_size)


class PeakMemory:
    """Most memory since it was made, beyond what there was, in bytes.

    One for all steps: what a step has freed, the allocator may keep for the next.
    """

    def __init__(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            with open("/proc/self/clear_refs", "w") as f:
                f.write("5")  # the peak begins anew
            self.before = self._status("VmRSS")

    def __call__(self) -> int:
        now = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else self._status("VmHWM")
        return now - self.before

    @staticmethod
    def _status(key: str) -> int:
        with open("/proc/self/status") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith(key))


def prefold_loss(options: argparse.Namespace, mode: str, device: torch.device) -> tuple[torch.nn.Module, Callable]:
    checkpoint = Checkpoint.dummy(geometry(options), name=options.model)
    model = load_model(checkpoint, dtype=torch.float32, device=device, pack=False)
    model.recompute = mode.endswith("recompute")
    sequences = make_sequences(options, model.config.vocab_size)
    prompts = [options.prompt] * options.completions

    def loss() -> torch.Tensor:  # laying out the batch is part of a step
        sharing = mode.split("-")[0]
        batch = TrainBatch.build(model.config, sequences, prompt_lengths=prompts, sharing=sharing)
        return sft_loss(logprobs(model, batch))

    return model, loss


def transformers_loss(options: argparse.Namespace, mode: str, device: torch.device) -> tuple[torch.nn.Module, Callable]:
    import transformers

    config = transformers.AutoConfig.for_model(**geometry(options))
    config._attn_implementation = "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device).train()
    ids = torch.from_numpy(np.stack(make_sequences(options, config.vocab_size))).to(device)

    def loss() -> torch.Tensor:
        logits = model(ids, use_cache=False, logits_to_keep=options.completion + 1).logits[:, :-1]
        targets = ids[:, -options.completion :]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return model, loss


def geometry(options: argparse.Namespace) -> dict:
    config = dict(resolve(options.model, load_format="dummy").config)
    return config | ({"num_hidden_layers": options.layers} if options.layers else {})


def measure(options: argparse.Namespace, mode: str, queue: multiprocessing.Queue) -> None:
    """One system's steps: seconds of each part of each step but the first, and their peak memory."""
    torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, loss = (transformers_loss if mode == "transformers" else prefold_loss)(options, mode, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    parts: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": []}
    losses = []

    def timed(part: str, run: Callable) -> object:
        started = time.perf_counter()
        result = run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        parts[part].append(time.perf_counter() - started)
        return result

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # makes its state
    memory = PeakMemory()
    for _ in range(options.repeats + 1):
        optimizer.zero_grad(set_to_none=False)
        value = timed("forward", loss)
        timed("backward", value.backward)
        losses.append(float(value.detach()))
        del value
        timed("optimizer", optimizer.step)
    queue.put({part: seconds[1:] for part, seconds in parts.items()} | {"peak": memory(), "losses": losses})


def in_own_process(options: argparse.Namespace, mode: str) -> dict:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=measure, args=(options, mode, queue))
    process.start()
    while True:
        try:
            result = queue.get(timeout=5)
            break
        except Exception:  # queue.Empty: is it still there?
            if not process.is_alive():
                raise SystemExit(f"{mode} ended with code {process.exitcode}: not enough memory?") from None
    process.join()
    return result


def curves(steps: int) -> dict[str, list[float]]:
    """Losses of the same steps in each mode: SFT on groups that are drawn anew for every step."""
    base = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 512}
    losses: dict[str, list[float]] = {}
    for sharing in ("off", "mlp", "full"):
        model = load_model(Checkpoint.dummy(base | SMALL), dtype=torch.float32, device="cpu", pack=False)
        optimizer, rng, losses[sharing] = torch.optim.AdamW(model.parameters(), lr=1e-3), np.random.default_rng(0), []
        for _ in range(steps):
            some = []
            for _ in range(4):
                prompt = rng.integers(0, 64, 48)
                some += [np.concatenate((prompt, prompt[:8], rng.integers(0, 64, 4))) for _ in range(4)]
            batch = TrainBatch.build(model.config, some, prompt_lengths=[48] * 16, sharing=sharing)
            loss = sft_loss(logprobs(model, batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[sharing].append(float(loss.detach()))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--completions", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=576)
    parser.add_argument("--completion", type=int, default=64)
    parser.add_argument("--modes", default="full,mlp,off")
    parser.add_argument("--recompute", action="store_true", help="also with layers computed again in the backward pass")
    parser.add_argument("--transformers", action="store_true", help="also transformers, padded")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--curve-steps", type=int, default=100)
    parser.add_argument("--json")
    options = parser.parse_args()

    config = config_from(geometry(options))
    sequences = make_sequences(options, config.vocab_size)
    prompts = [options.prompt] * options.completions
    modes = options.modes.split(",")
    systems = modes + [f"{mode}-recompute" for mode in modes if options.recompute]
    systems += ["transformers"] if options.transformers else []
    batches = {
        mode: TrainBatch.build(config, sequences, prompt_lengths=prompts, sharing=mode)
        for mode in ("full", "mlp", "off")
    }
    torch.set_num_threads(options.threads)
    print(machine(), f"{options.model}, {config.layers} layers, {options.completions} completions, float32", flush=True)
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name())
    results = {}
    for system in systems:
        results[system] = in_own_process(options, system)
        print("  ", system, json.dumps(results[system]), flush=True)

    def whole(system: str) -> list[float]:
        found = results[system]
        return [sum(parts) for parts in zip(*(found[p] for p in ("forward", "backward", "optimizer")), strict=True)]

    base = median(whole("off")) if "off" in results else None
    rows = []
    for system in systems:
        found, batch = results[system], batches.get(system.split("-")[0], batches["off"])
        gain = f"{base / median(whole(system)):.2f}" if base else ""
        rows.append(
            [
                system,
                batch.num_rows,
                *(f"{median(found[part]):.2f}" for part in ("forward", "backward", "optimizer")),
                f"{median(whole(system)):.2f} ({spread(whole(system))})",
                gain,
                f"{step_flops(batches['off']) / step_flops(batch):.2f}",
                f"{found['peak'] / 1e9:.2f}",
                f"{found['losses'][-1]:.5f}",
            ]
        )
    columns = ["system", "rows", "forward s", "backward s", "optimizer s", "step s", "gain", "FLOP ratio"]
    print(table([*columns, "peak GB", "last loss"], rows))
    losses = curves(options.curve_steps)
    apart = {
        mode: max(abs(a - b) / a for a, b in zip(losses["off"], losses[mode], strict=True)) for mode in ("mlp", "full")
    }
    first, last = losses["off"][0], losses["off"][-1]
    print(f"{options.curve_steps} steps, loss {first:.4f} to {last:.4f}; furthest from off: {apart}")
    write_json(options.json, steps=results, curves=losses)


if __name__ == "__main__":
    main()
