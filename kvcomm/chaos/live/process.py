"""``Process``: a process of a story; it ends with its story, whatever becomes of that."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from kvcomm.chaos.live.orders import AnyAnswer, AnyOrder, Failed, decode_answer, encode
from kvcomm.errors import Unavailable

END_WITHIN_S = 5.0


class Process:
    """``command`` with the log that it writes.  Its standard input is ours: it is to end when that closes."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        variables: Mapping[str, str],
        *,
        speaks: bool = False,
    ) -> None:
        self.name, self.log = name, log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if speaks else output,
                stderr=output,
                env={**os.environ, **variables},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        if self.alive:
            self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self.signal(signal.SIGKILL)
        self._process.wait(END_WITHIN_S)

    def stop(self) -> None:
        """SIGTERM, and wait for its end; one that is paused goes on for that.

        Raises:
            Unavailable: it does not end.
        """
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)
        try:
            self._process.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{self.name} does not end when it is told to: {self.last_words()}") from None

    def end(self) -> None:
        """Let it end by itself, as far as it does in time.  Idempotent."""
        self.ask_to_end()
        try:
            self._process.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_WITHIN_S)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def ask_to_end(self) -> None:
        self.signal(signal.SIGCONT)
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # it has ended
                self._process.stdin.close()

    def last_words(self, lines: int = 5) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError) as error:
            raise Unavailable(f"{self.name} has ended: {self.last_words()}") from error

    def lines(self, into: queue.SimpleQueue[bytes]) -> None:
        """Read its output to the end; ``b""`` = that is all."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            into.put(line)
        into.put(b"")


class Agent:
    """The clients of one host (``kvcomm.chaos.live.agent``), from outside."""

    def __init__(self, node: str, process: Process) -> None:
        self.node, self.process = node, process
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=process.lines, args=(self._answers,), daemon=True)
        self._reader.start()

    def ask(self, order: AnyOrder, within_s: float = 30.0) -> AnyAnswer:
        self.tell(order)
        return self.answer(within_s)

    def tell(self, order: AnyOrder) -> None:
        """Orders are done one after the other, each is answered: several agents can be told first."""
        self.process.write(encode(order))

    def answer(self, within_s: float = 30.0) -> AnyAnswer:
        """Raises ``Unavailable``: it failed, or there was none in time."""
        try:
            line = self._answers.get(timeout=within_s)
        except queue.Empty:
            raise Unavailable(f"the clients of {self.node} do not answer within {within_s:g} s") from None
        if not line:
            raise Unavailable(f"the clients of {self.node} ended: {self.process.last_words()}")
        answer = decode_answer(line)
        if isinstance(answer, Failed):
            raise Unavailable(f"{self.node}: {answer.text}")
        return answer

    def end(self) -> None:
        self.process.end()
        self._reader.join(END_WITHIN_S)
