"""The options of a server: its address, its names, its limits. The LLM has the options of the engine."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import JobError
from .fields import option

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """The options of a server. A field whose parameter of the command line is None is set in Python only."""

    host: str = option("127.0.0.1", "Address to listen on.", metavar="ADDRESS")
    port: int = option(8000, "Port to listen on; 0: one that is free.", least=0, most=65535)
    served_names: tuple[str, ...] = option(
        (), "A name that requests may ask for; the first stands in responses; by default the checkpoint's own."
        " May be repeated.", flags="--served-model-name",
        metavar="NAME",
    )  # fmt: skip
    api_keys: str | None = option(
        None, "Who may ask: keys and their tenants, in TOML. Read again on SIGHUP.", metavar="FILE"
    )
    insecure: bool = option(False, "Listen on an address that others reach, without keys, and be asked by any name.")
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Without keys: a name by which the server may be asked, and whose pages may ask it. With --insecure: by no"
        " other than these and the machine's own. May be repeated.",
        flags="--allowed-host", metavar="NAME",
    )  # fmt: skip
    data_dir: str | None = option(None, "Where files and batches are kept; none without it.", metavar="FOLDER")
    max_file_bytes: int = option(1 << 30, "Size of a file that is uploaded.")
    drain_seconds: float = option(30.0, "How long requests may go on after SIGTERM.", least=0)
    max_waiting_requests: int = option(
        1024, "Requests that may wait for a free sequence; others are refused with 429.", least=1
    )
    max_waiting_tokens: int = option(1 << 22, "Tokens that may wait.", least=1)
    step_ms: float | None = option(
        None,
        "How long a step should take while live requests are there: rows are adjusted to the measured rate."
        "  [default: 100 while several tenants have live requests; else a batch lengthens live steps by a quarter, and"
        " nothing else is bounded]",
        least=0, above=True, metavar="MS",
    )  # fmt: skip
    batch_share: float = option(
        0.02, "The part of the time that batches get while live requests never pause.", least=0, most=1, above=True,
        metavar="SHARE",
    )  # fmt: skip
    max_body_bytes: int = option(16 << 20, "Size of a request's body.")
    max_receiving_bytes: int = option(1 << 30, "Size of all bodies that are being received.")
    max_connections: int = option(4096, "Connections at once.", least=1)
    max_texts: int = option(
        4096, "Texts, documents or prompts of one request, and samples of all its prompts.", least=1
    )
    max_n: int = option(128, "Samples of a prompt.", least=1)
    max_logprobs: int = option(20, "Most likely tokens that are listed.", least=0)
    max_grammar_bytes: int = option(256 << 10, "Size of a schema, regular expression or grammar.")
    allow_chat_template: bool = option(False, "Requests may bring a chat template of their own.")
    escape_special: bool = option(False, "Special tokens in what messages hold stay text.")
    reasoning_parser: str = option(
        "auto",
        "Part answers of chats into reasoning, between <think> and </think>, and text. auto: where the model's chat"
        " template has <think>.",
        one_of=("auto", "think", "none"),
    )  # fmt: skip
    calibration: str | None = option(
        None,
        "Temperatures and thresholds of decisions, from `prefold decide --save-calibration`: for requests that ask a"
        " question of this name and content.",
        metavar="FILE",
    )
    access_log: str = option(
        "off",
        "Log a line about each request, as text or as a JSON object: never prompts, answers or keys. Without a value:"
        " text.",
        one_of=("off", "text", "json"),
    )
    access_log_probes: bool = option(
        False, "Log requests for health and metrics too, which the access log leaves out otherwise."
    )
    body_seconds: float = option(60.0, "In which a request's body must have come.", None)
    header_seconds: float = option(30.0, "In which a request's headers must have come.", None)
    max_header_bytes: int = option(64 << 10, "Size of a request's headers.", None)
    ping_seconds: float = option(
        15.0, "After so long without an event a stream sends a comment, so that proxies keep it open.", None
    )
    send_seconds: float = option(60.0, "In which a client must take what it is sent.", None)

    @property
    def is_local(self) -> bool:
        """Returns whether only this machine reaches the address."""
        return self.host in LOOPBACK

    @property
    def most_of_one_tenant(self) -> int:
        """Returns how many bytes of one tenant's bodies may be received at once: with several tenants, half of all."""
        return self.max_receiving_bytes // (1 if self.api_keys is None else 2)

    def check(self) -> None:
        """Raises JobError if other machines could reach the server without an option that allows it, or if a body of
        the allowed size could never be received."""
        if not self.is_local and self.api_keys is None and not self.insecure:
            raise JobError(
                f"{self.host} can be reached by other machines, and there are no keys; give --api-keys FILE, or"
                " --insecure to let everybody in"
            )
        if self.max_body_bytes > self.most_of_one_tenant:
            times, owner = (1, "") if self.api_keys is None else (2, " of one tenant")
            raise JobError(
                f"--max-body-bytes allows a body of {self.max_body_bytes} bytes, --max-receiving-bytes only"
                f" {self.most_of_one_tenant}{owner} at once; give --max-receiving-bytes"
                f" {times * self.max_body_bytes} or more, or a smaller --max-body-bytes"
            )
