"""PeerIdentity: by what two engines know that each can use the other's contents, and that both have one secret.

Each side proves that it has the secret without saying it. A proof is of the address that was called, so that nobody in
between can pass it on to another engine.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from typing import NamedTuple

from graphllm.engine.transfer.frames import VERSION, Challenge, Hello, Welcome

_NONCE = 16  # bytes


class Address(NamedTuple):
    """Where an engine is found.

    engine_id: its id.
    host, port: over a network; "" and 0 within a folder.
    """

    engine_id: str
    host: str = ""
    port: int = 0


@dataclass(frozen=True)
class PeerIdentity:
    """Of this engine.

    identity: of the model and its blocks.
    secret: what contents are found by.
    ranks: of the engine.
    """

    identity: str
    secret: bytes
    ranks: int

    def hello(self, challenge: Challenge, called: Address) -> Hello:
        """What this engine says to one that it has called."""
        proof = self._proof("hello", challenge.nonce, called)
        nonce = secrets.token_bytes(_NONCE)
        return Hello(VERSION, self.identity, self.ranks, called.engine_id, nonce, proof)

    def challenge(self) -> Challenge:
        """The first word to an engine that calls."""
        return Challenge(secrets.token_bytes(_NONCE))

    def refusal(self, challenge: Challenge, said: Hello, own: Address) -> str:
        """Why an engine that calls gets nothing; "": it may have contents. own: the address of this one."""
        if said.version != VERSION:
            return "it speaks another version of this protocol"
        if said.engine != own.engine_id:
            return "another engine has its address now"
        if said.identity != self.identity:
            return "it runs another model, or one of another dtype, layout or block size"
        if said.ranks != self.ranks:
            return f"its engine has {self.ranks} ranks"
        if not hmac.compare_digest(said.proof, self._proof("hello", challenge.nonce, own)):
            return "it has another cache_secret; give the same to both"
        return ""

    def welcome(self, said: Hello, own: Address) -> bytes:
        """The proof of an engine that was called."""
        return self._proof("welcome", said.nonce, own)

    def trusts(self, welcome: Welcome, said: Hello, called: Address) -> bool:
        """Whether an engine that was called has proved that it knows the secret."""
        return hmac.compare_digest(welcome.proof, self._proof("welcome", said.nonce, called))

    def _proof(self, word: str, nonce: bytes, called: Address) -> bytes:
        parts = (word.encode(), nonce, called.engine_id.encode(), called.host.encode(), str(called.port).encode())
        return hmac.digest(self.secret, b"".join(len(part).to_bytes(4, "little") + part for part in parts), "sha256")
