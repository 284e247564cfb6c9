"""How a server behaves: its address, its names, its limits. What the engine does is settled by the LLM's options."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import JobError

__all__ = ["ServeOptions"]

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """ServeOptions says how a server behaves.

    host, port            the address; port 0: one that is free
    served_names          names by which requests may ask for the model, the first of them stands in responses; none:
                          the checkpoint's own
    api_keys              a file of keys (see `keys.py`); None: everybody is let in
    data_dir              a folder for files and batches; None: these are not served
    max_file_bytes        of a file that is uploaded
    allowed_hosts         without keys: names, beside those of this machine, by which the server may be asked, and whose
                          pages may ask it; an address that other machines reach may be asked by any name where there
                          are none
    insecure              allow an address that other machines reach, without keys
    drain_seconds         after SIGTERM: how long requests that run may go on
    max_body_bytes        of one request
    max_receiving_bytes   of all bodies that have not come wholly; of one tenant's the half (`most_of_one_tenant`)
    body_seconds          in which a request's body must have come
    header_seconds        in which a request's headers must have come
    max_header_bytes      of one request
    max_connections       at once
    max_texts             texts, documents or prompts of one request, or of a batch's line, and samples of all its
                          prompts together
    max_n                 samples of a prompt
    max_grammar_bytes     of a schema, regular expression or grammar: so that none takes long to compile
    max_logprobs          most likely tokens that are listed
    max_waiting_requests  requests that wait to be computed, a prompt as many as its samples; further ones are refused
                          with 429
    max_waiting_tokens    tokens of their prompts
    step_ms               how long a step should take while live requests are there; None: as long as it takes
    batch_share           the part of the time that batches get, at least, while live requests never pause
    ping_seconds          after so long without an event a stream sends a comment, so that proxies keep it open
    allow_chat_template   whether requests may bring a chat template of their own, which is a program in a sandbox
    escape_special        whether special tokens in what a conversation holds stay text
    reasoning_parser      whether answers of chats are parted into reasoning and text: "auto", where the chat template
                          has <think>; "think": where they begin with it; "none": never
    access_log            whether a line is logged about each request
    send_seconds          in which a client must take what it is sent
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_names: tuple[str, ...] = ()
    api_keys: str | None = None
    data_dir: str | None = None
    max_file_bytes: int = 1 << 30
    allowed_hosts: tuple[str, ...] = ()
    insecure: bool = False
    drain_seconds: float = 30.0
    max_body_bytes: int = 16 << 20
    max_receiving_bytes: int = 1 << 30
    body_seconds: float = 60.0
    header_seconds: float = 30.0
    max_header_bytes: int = 64 << 10
    max_connections: int = 4096
    max_texts: int = 4096
    max_n: int = 128
    max_logprobs: int = 20
    max_grammar_bytes: int = 64 << 10
    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 1 << 22
    step_ms: float | None = None
    batch_share: float = 0.02
    ping_seconds: float = 15.0
    allow_chat_template: bool = False
    escape_special: bool = False
    reasoning_parser: str = "auto"
    access_log: bool = False
    send_seconds: float = 60.0

    @property
    def is_local(self) -> bool:
        """Returns whether only this machine reaches the address."""
        return self.host in LOOPBACK

    @property
    def most_of_one_tenant(self) -> int:
        """Returns how many bytes of one tenant's bodies may be received at once: of several tenants none takes all."""
        return self.max_receiving_bytes // (1 if self.api_keys is None else 2)

    def check(self) -> None:
        """Raises JobError where other machines could reach the server and nobody asked for that, and where a body that
        is allowed could never be received."""
        if not self.is_local and self.api_keys is None and not self.insecure:
            raise JobError(
                f"{self.host} can be reached by other machines, and there are no keys; give --api-keys FILE, or"
                " --insecure to let everybody in"
            )
        if self.max_body_bytes > self.most_of_one_tenant:
            times, whose = (1, "") if self.api_keys is None else (2, " of one tenant")
            raise JobError(
                f"--max-body-bytes allows a body of {self.max_body_bytes} bytes, --max-receiving-bytes only"
                f" {self.most_of_one_tenant}{whose} at once; give --max-receiving-bytes"
                f" {times * self.max_body_bytes} or more, or a smaller --max-body-bytes"
            )
