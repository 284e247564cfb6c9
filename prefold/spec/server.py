"""The options of a server: its address, names and limits. The engine's options belong to the LLM."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import JobError
from .fields import option

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """The options of a server. An option with the command-line parameter None is set in Python only."""

    host: str = option("127.0.0.1", "Address to listen on.", group="Server", common=True, metavar="ADDRESS")
    port: int = option(
        8000, "Port to listen on (0: any free port).", group="Server", common=True, least=0, most=65535
    )  # fmt: skip
    served_names: tuple[str, ...] = option(
        (), "Model name that requests may use (default: the checkpoint's name).",
        details="Responses contain the first name.",
        group="Server", common=True, flags="--served-model-name", metavar="NAME",
    )  # fmt: skip
    api_keys: str | None = option(
        None, "TOML file with API keys and their tenants; SIGHUP rereads it.",
        group="Server", common=True, metavar="FILE",
    )  # fmt: skip
    insecure: bool = option(
        False, "Allow requests from other machines without API keys, under any host name.", group="Server", common=True
    )
    allowed_hosts: tuple[str, ...] = option(
        (), "Without keys: host name that requests and web pages may use.",
        details="With --insecure only these names and the machine's own names are allowed.",
        group="Server", flags="--allowed-host", metavar="NAME",
    )  # fmt: skip
    data_dir: str | None = option(
        None, "Folder for uploaded files and batches (default: none are accepted).",
        group="Server", common=True, metavar="FOLDER",
    )  # fmt: skip
    max_file_bytes: int = option(1 << 30, "Maximum size of an uploaded file.", group="Limits")
    drain_seconds: float = option(
        30.0, "Seconds that running requests may continue after SIGTERM.", group="Limits", least=0
    )
    max_waiting_requests: int = option(
        1024, "Maximum number of waiting requests; further requests get status 429.", group="Limits", least=1
    )
    max_waiting_tokens: int = option(1 << 22, "Maximum number of tokens in waiting requests.", group="Limits", least=1)
    step_ms: float | None = option(
        None, "Target duration of a step while live requests run (default: 100 with several tenants).",
        details="The number of rows in a step follows the measured speed. By default 100 ms while several tenants have"
        " live requests. Otherwise a batch may lengthen live steps by a quarter, and no other limit applies.",
        group="Performance", least=0, above=True, metavar="MS",
    )  # fmt: skip
    batch_share: float = option(
        0.02, "Share of time for batches while live requests never pause.",
        group="Performance", least=0, most=1, above=True, metavar="SHARE",
    )  # fmt: skip
    max_body_bytes: int = option(16 << 20, "Maximum size of a request body.", group="Limits")
    max_receiving_bytes: int = option(1 << 30, "Maximum total size of request bodies being received.", group="Limits")
    max_connections: int = option(4096, "Maximum number of open connections.", group="Limits", least=1)
    max_texts: int = option(
        4096, "Maximum texts, documents, prompts and samples of one request.",
        details="Samples are counted over all prompts of the request.", group="Limits", least=1,
    )  # fmt: skip
    max_n: int = option(128, "Maximum number of samples per prompt.", group="Limits", least=1)
    max_logprobs: int = option(20, "Maximum number of most likely tokens to return.", group="Limits", least=0)
    max_grammar_bytes: int = option(
        256 << 10, "Maximum size of a schema, regular expression or grammar.", group="Limits"
    )
    allow_chat_template: bool = option(False, "Let requests bring their own chat template.", group="Server")
    escape_special: bool = option(False, "Treat special tokens inside messages as plain text.", group="Server")
    reasoning_parser: str = option(
        "auto", "Separate reasoning (<think>...</think>) from the text of chat answers.",
        details="auto: if the model's chat template contains <think>.",
        group="Server", one_of=("auto", "think", "none"),
    )  # fmt: skip
    calibration: str | None = option(
        None, "File with temperatures and thresholds for decisions, from --save-calibration.",
        details="`prefold decide` writes it. It applies to requests with a question of the same name and content.",
        group="Calibration", metavar="FILE",
    )  # fmt: skip
    access_log: str = option(
        "off", "Log a line per request, as text or JSON; without a value: text.",
        details="The log never contains prompts, answers or keys.",
        group="Server", one_of=("off", "text", "json"),
    )  # fmt: skip
    access_log_probes: bool = option(False, "Also log requests for health and metrics.", group="Server")
    body_seconds: float = option(60.0, "Seconds in which a request's body must arrive.", None, group="Limits")
    header_seconds: float = option(30.0, "Seconds in which a request's headers must arrive.", None, group="Limits")
    max_header_bytes: int = option(64 << 10, "Maximum size of a request's headers.", None, group="Limits")
    ping_seconds: float = option(
        15.0, "Send a comment on a stream after this many seconds without an event.", None,
        details="Proxies then keep the stream open.", group="Server",
    )  # fmt: skip
    send_seconds: float = option(
        60.0, "Seconds in which a client must accept the data sent to it.", None, group="Limits"
    )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the address."""
        return self.host in LOOPBACK

    @property
    def most_of_one_tenant(self) -> int:
        """Maximum total bytes of one tenant's bodies being received: with API keys, half of the limit for all."""
        return self.max_receiving_bytes // (1 if self.api_keys is None else 2)

    def check(self) -> None:
        """Check options that depend on each other.

        Raises:
            JobError: Other machines could reach the server without keys, or the limits never admit the largest body.
        """
        if not self.is_local and self.api_keys is None and not self.insecure:
            raise JobError(
                f"{self.host} can be reached by other machines, and there are no API keys; give --api-keys FILE, or"
                " --insecure to allow all requests"
            )
        if self.max_body_bytes > self.most_of_one_tenant:
            times, owner = (1, "") if self.api_keys is None else (2, " of one tenant")
            raise JobError(
                f"--max-body-bytes is {self.max_body_bytes}, but --max-receiving-bytes allows only"
                f" {self.most_of_one_tenant} bytes{owner} at once; give --max-receiving-bytes"
                f" {times * self.max_body_bytes} or more, or a smaller --max-body-bytes"
            )
