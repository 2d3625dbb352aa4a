"""``Operators``: what operators' commands have to do with the controllers of a cluster: ask any of them how
it is, give the leading one an order."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvcomm.block import Incarnation
from kvcomm.credentials import NODE_TENANT
from kvcomm.errors import ConfigError, KVCommError, OutcomeUnknown, Refused, Unavailable, failure_to_error
from kvcomm.wire.messages import ClusterGet, ClusterView, Failure, Message, OrderAnswer

if TYPE_CHECKING:
    from kvcomm.instance import Instance, NodeRecord

ASK_S = 2.0
ORDER_S = 20.0
"""More than two leases: a leader that died has a successor by then."""
PAUSE_S = 0.25
NOT_LEADER = "not_leader"

AskFunction = Callable[[str, Message], tuple[Message, bool]]
"""A controller's name and what to ask it: its answer, and whether it is its own word."""


class Operators:
    """Asks the controllers of one cluster.  Not thread-safe.

    Args:
        names: of the controllers, in the order in which they are tried.
        ask: asks one of them; one that does not answer is told as a failure.
    """

    def __init__(
        self,
        instance: str,
        names: list[str],
        ask: AskFunction,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.instance, self._names, self._ask = instance, names, ask
        self._clock, self._sleep = clock, sleep

    def view(self) -> ClusterView:
        """What the leader says, else any other controller.

        Raises:
            Unavailable: there is no controller, or none answers.
        """
        found: ClusterView | None = None
        for name in self._tried():
            answer, _ = self._ask(name, ClusterGet())
            if isinstance(answer, ClusterView):
                found = answer
                if answer.leader == answer.controller:
                    self._names = [name, *(each for each in self._names if each != name)]
                    break
        if found is None:
            raise Unavailable(self._nobody())
        return found

    def order(self, message: Message, wait_s: float = ORDER_S) -> OrderAnswer:
        """Give an order to whoever leads, following it where it moved; waits while nobody leads.

        Raises:
            Refused: it cannot be done, or not now; the text says why.
            Unavailable: nobody led, or not enough was known, for all that time.
            OutcomeUnknown: it may have been taken; look with ``kvcomm status``.
        """
        deadline, names, problem, lost = self._clock() + wait_s, self._tried(), "", False
        target = names[0]
        while True:
            answer, spoken = self._ask(target, message)
            if isinstance(answer, OrderAnswer):
                return answer
            if not isinstance(answer, Failure):
                raise Refused(f"{target} answers {type(answer).__name__}; use equal versions")
            problem = f"{target}: {answer.text}"
            if answer.code == NOT_LEADER:
                target = self._after(target, answer.detail.decode())
            elif answer.code == Unavailable.code:
                lost = lost or not spoken
                target = target if spoken else self._after(target, "")
            elif lost:
                raise OutcomeUnknown(
                    f"an answer was lost, and the order may have been taken: {answer.text}; "
                    f"look with: kvcomm status --instance {self.instance}"
                )
            else:
                raise failure_to_error(answer.code, answer.text, answer.detail)
            if self._clock() + PAUSE_S >= deadline:
                raise Unavailable(f"the order was not taken in {wait_s:.0f} s ({problem})")
            self._sleep(PAUSE_S)

    def ask(self, message: Message) -> Message:
        """Ask the first that answers; a failure that it tells is raised.

        Raises:
            Unavailable: none answers.
            KVCommError: as it says.
        """
        for name in self._tried():
            answer, _ = self._ask(name, message)
            if not isinstance(answer, Failure):
                return answer
            if answer.code != Unavailable.code:  # else it is gone, or about to be
                raise failure_to_error(answer.code, answer.text, answer.detail)
        raise Unavailable(self._nobody())

    def _tried(self) -> list[str]:
        if not self._names:
            raise Unavailable(
                f"no controller of instance {self.instance!r} runs here: kvcomm up starts them, and one that "
                f"was lost is started by hand, with the configuration that kvcomm up was given: "
                f"kvcomm controller --node controller-0 --instance {self.instance} --config FILE"
            )
        return self._names

    def _after(self, target: str, leader: str) -> str:
        if leader in self._names:
            return leader
        return self._names[(self._names.index(target) + 1) % len(self._names)]

    def _nobody(self) -> str:
        return (
            f"no controller of instance {self.instance!r} answers ({', '.join(self._names)}): "
            f"reads and writes go on without them, changes wait"
        )


@contextmanager
def operators(name: str | None) -> Iterator[Operators]:
    """Of the cluster of that name, else of ``$KVCOMM_INSTANCE``, else of the only one that runs here.

    Raises:
        ConfigError: it does not say which of several.
        Unavailable: none runs here.
    """
    instance = instance_of(name)
    addresses = controllers_among(instance.nodes())
    addresses |= {name: at for name, at in _configured(instance).items() if name not in addresses}
    with asking(instance, addresses) as asked:
        yield asked


def controllers_among(nodes: Iterable[NodeRecord]) -> dict[str, str]:
    """Where those of these nodes that are controllers are to be asked."""
    return {each.node: each.addresses[0] for each in nodes if each.role == "controller"}


@contextmanager
def asking(instance: Instance, addresses: Mapping[str, str]) -> Iterator[Operators]:
    """The controllers at these addresses, asked as one of the cluster's own processes."""
    from kvcomm.rpc import Identity, Peers, run_blocking
    from kvcomm.steps import Ask, ask_all

    identity = Identity(instance.credentials().token(NODE_TENANT), Incarnation(secrets.randbits(64) | 1))
    peers = Peers(identity, connect_timeout_s=ASK_S)

    def ask(controller: str, message: Message) -> tuple[Message, bool]:
        try:
            asks = ask_all([Ask(addresses[controller], message, timeout_s=ASK_S)])
            (answer,) = run_blocking(asks, peers, time.monotonic() + ASK_S)
        except KVCommError as error:
            return Failure(error.code, error.message), False
        return answer.message, answer.spoken

    try:
        yield Operators(instance.name, sorted(addresses), ask)
    finally:
        peers.close()


def instance_of(name: str | None) -> Instance:
    """Raises as :func:`operators`."""
    from kvcomm.connect import INSTANCE_VARIABLE
    from kvcomm.instance import Instance

    name = name or os.environ.get(INSTANCE_VARIABLE)
    if name:
        return Instance.open(name)
    running = [each for each in Instance.list() if each.nodes()]
    if not running:
        raise Unavailable("no cluster runs on this host; start one with: kvcomm up")
    if len(running) > 1:
        names = ", ".join(each.name for each in running)
        raise ConfigError(f"several clusters run on this host ({names}): name one with --instance")
    return running[0]


def _configured(instance: Instance) -> dict[str, str]:
    """Controllers on other hosts, from the configuration that the cluster was started with."""
    from kvcomm.settings import load_config

    path = instance.directory / "kvcomm.yaml"
    if not path.is_file():
        return {}
    addresses = load_config(path).cluster.controller_addresses
    return {f"controller-{index}": address for index, address in enumerate(addresses)}
