"""What computes a job: this process, a fleet of replicas, or other servers."""

from __future__ import annotations

import json
from dataclasses import dataclass

from .fields import SpecError, option


@dataclass(frozen=True, kw_only=True)
class FleetSpec:
    """The backend of a job, and its replicas."""

    ray: str | None = option(
        None,
        "Run replicas of the model on a Ray cluster. Without ADDRESS: on the cluster of RAY_ADDRESS, else on this"
        " machine. Write it behind INPUT, or as --ray=ADDRESS.",
        metavar="[ADDRESS]", journal=False,
    )  # fmt: skip
    urls: tuple[str, ...] = option(
        (),
        "A server that runs the model: one with OpenAI's API (vLLM, SGLang, prefold serve, ...), or TEI. May be"
        " repeated. PREFOLD_API_KEY in the environment is its key.",
        "url", metavar="URL", journal=False,
    )  # fmt: skip
    tokenizer: str | None = option(
        None,
        "With --url: a folder, hub id or built-in name with the tokenizer, so that token ids are sent.  [default: that"
        " of --model, if it is a folder; else texts are sent]",
        metavar="NAME",
    )
    backend: str | None = option(
        None,
        "What computes, here or on the replicas of --ray: prefold, vllm, or what a package or --plugin adds. vLLM"
        " generates text only, and runs models that prefold does not know.  [default: prefold]",
        metavar="NAME",
    )
    backend_option: tuple[str, ...] = option(
        (),
        "With --backend vllm: a field of its AsyncEngineArgs, such as block_size=32. May be repeated.",
        metavar="NAME=VALUE",
    )
    replicas: int | None = option(
        None,
        "How many, each with --threads or, on GPUs, --tensor-parallel GPUs of its own.  [default: as many as there is"
        " room for]",
        least=1, journal=False,
    )  # fmt: skip
    patience: float = option(
        300.0, "A replica that has work and makes no progress for so long is killed.",
        least=0, above=True, metavar="SECONDS", journal=False,
    )  # fmt: skip

    @property
    def backend_name(self) -> str:
        """Return the name of the backend in the table of backends."""
        return "url" if self.urls else self.backend or "prefold"

    @property
    def backend_options(self) -> dict[str, object]:
        """Return the values of --backend-option by name. Raise SpecError for a text that is not NAME=VALUE."""
        options: dict[str, object] = {}
        for text in self.backend_option:
            name, _, value = text.partition("=")
            if not name or not value:
                message = f"--backend-option {text!r} is not NAME=VALUE, such as block_size=32"
                raise SpecError(message, field="backend_option")
            try:
                options[name] = json.loads(value)
            except ValueError:
                options[name] = value
        return options
