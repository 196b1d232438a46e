"""Rollout engine over SGLang servers: it launches or is given them, keeps them in step with the weights, and asks.

Replies are sampled by the servers while the caller steps environments; `poll` hands out what is there. Log-probs equal
those of the engine in this process to 1e-4 in float32 (tested against a real server).
"""

from __future__ import annotations

import queue
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from geo_sokoban_pipeline.options.server import ServerOptions
from geo_sokoban_pipeline.policies.experts import published_weights
from geo_sokoban_pipeline.policies.policy import Policy, save_policy
from geo_sokoban_pipeline.rollout.engines.base import Request, Result
from geo_sokoban_pipeline.rollout.engines.sglang.background import BackgroundLoop
from geo_sokoban_pipeline.rollout.engines.sglang.dispatcher import Dispatcher
from geo_sokoban_pipeline.rollout.engines.sglang.faults import EngineStopped
from geo_sokoban_pipeline.rollout.engines.sglang.fleet import Fleet, check_alike
from geo_sokoban_pipeline.rollout.engines.sglang.weights import WeightSet, clear_folder, make_tag
from geo_sokoban_pipeline.rollout.engines.sglang.wire import Terms, room_of


class SglangEngine:
    """`RolloutEngine` over one or several SGLang servers.

    Args:
        policy: its folder is what servers are launched with, and its model where weights come from.
        options: of the servers.

    Raises:
        ServerLost: a server does not start.
        WrongServer: a given server serves something else.
    """

    name = "sglang"

    def __init__(self, policy: Policy, options: ServerOptions) -> None:
        self.policy = policy
        self.version = 0
        self._options = options
        self._scratch = tempfile.TemporaryDirectory(prefix="geo_sokoban_weights_", dir=options.update_folder)
        self._versions: dict[str, int] = {}
        self._weights: WeightSet | None = None
        self._sent_state: tuple[int, ...] | None = None
        self._answers: queue.SimpleQueue[Result | BaseException] = queue.SimpleQueue()
        self._open: dict[int, Future[None]] = {}
        self._loop = BackgroundLoop("sglang engine")
        self._fleet = self._loop.run(_build_fleet(options, policy))
        try:
            self._loop.run(self._fleet.start())
            facts = check_alike(self._fleet.facts)
        except BaseException:
            self.close()
            raise
        self.software_version = facts.version
        self.seeded = facts.seeded
        self.terms = Terms(
            size=int(policy.model.config.text_config.vocab_size),
            banned=frozenset(policy.banned_ids.tolist()),
            end_ids=policy.end_ids,
            pad_id=policy.codec.image_pad_id,
            merge_size=policy.codec.merge_size,
            context=facts.context,
            longest_prompt=facts.longest_prompt,
        )
        self._dispatcher = Dispatcher(self._fleet, self.terms, self._versions.__getitem__)

    @property
    def urls(self) -> list[str]:
        """Addresses of the servers."""
        return [member.url for member in self._fleet.members]

    @property
    def cached_tokens(self) -> dict[int, int]:
        """Per conversation, tokens of its last prompt that a server had not to read again."""
        return self._dispatcher.cached_tokens

    def submit(self, requests: Sequence[Request]) -> None:
        """Start requests; see `RolloutEngine`.

        Raises:
            ValueError: a conversation already has a request in flight.
        """
        if self._weights is None:
            self.update_weights(None, self.version)
        for request in requests:
            if request.id in self._open:
                raise ValueError(f"conversation {request.id} already waits for a reply; poll or abort it first.")
            self._open[request.id] = self._loop.start(self._answer(request, self._answers))

    def poll(self) -> list[Result]:
        """Replies that are there; waits for one while any is in flight.

        Raises:
            EngineStopped, RequestRefused, WrongServer: a request could not be answered; none is in flight any more.
        """
        if not self._open:
            return []
        answers = [self._answers.get()]
        while not self._answers.empty():
            answers.append(self._answers.get())
        results = []
        for answer in answers:
            if isinstance(answer, BaseException):
                self._drop_all()
                raise answer
            del self._open[answer.id]
            results.append(answer)
        return results

    def abort(self, ids: Iterable[int]) -> None:
        """Stop requests; they are answered with what there is of them, as `abort` where that is not whole."""
        for identity in ids:
            self._loop.run(self._abort(identity))

    def release(self, ids: Iterable[int]) -> None:
        """Nothing to do: a server's cache forgets what was not asked for longest."""
        for identity in ids:
            self.cached_tokens.pop(identity, None)

    def update_weights(self, weights: Iterable[tuple[str, Any]] | Path | None, version: int) -> None:
        """Give the servers new weights; what is in flight goes on with them.

        Args:
            weights: by Hugging Face name; or a policy folder that the servers can read; None: those of the policy's
                model as it is. The same version of an unchanged model is not sent twice.
        """
        state = self._model_state() if weights is None else None
        if state is not None and state == self._sent_state and self._weights is not None and version == self.version:
            return
        before, self._weights = self._weights, self._make_set(weights, version)
        self._sent_state = None
        self._versions[self._weights.tag] = version
        self._loop.run(self._fleet.renew(self._weights, pause=bool(self._open)))
        self.version = self._dispatcher.version = version
        self._sent_state = state
        if before is not None and before.folder is not None and before.folder.is_relative_to(self._scratch.name):
            clear_folder(before.folder)

    def close(self) -> None:
        """Let the servers go; launched ones stay until this process ends, see `keeper`."""
        self._drop_all()
        self._loop.run(self._fleet.close())
        self._loop.close()
        self._scratch.cleanup()

    async def _answer(self, request: Request, answers: queue.SimpleQueue[Result | BaseException]) -> None:
        """Put the reply into the queue of when it was asked for: `_drop_all` gives later requests another one."""
        try:
            if room_of(request, self.terms) <= 0:
                answers.put(_answer_nothing(request, self.version))
            else:
                answers.put(await self._dispatcher.answer(request))
        except Exception as error:  # whatever it is, the caller of `poll` has to know
            answers.put(error)

    async def _abort(self, identity: int) -> None:
        self._dispatcher.abort(identity)

    def _drop_all(self) -> None:
        for future in self._open.values():
            future.cancel()
        self._open.clear()
        self._answers = queue.SimpleQueue()

    def _make_set(self, weights: Iterable[tuple[str, Any]] | Path | None, version: int) -> WeightSet:
        tag = make_tag(version)
        if isinstance(weights, Path):
            return WeightSet(version, tag, tuple, weights)
        named = None if weights is None else list(weights)
        if self._options.update == "disk":
            folder = Path(self._scratch.name) / tag
            save_policy(self.policy, folder, None if named is None else dict(named))
            return WeightSet(version, tag, tuple, folder)
        if named is not None:
            return WeightSet(version, tag, lambda: named)
        return WeightSet(version, tag, partial(self._read_model, version, self._model_state()))

    def _read_model(self, version: int, state: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
        """Weights of the policy's model, as long as they are those of this version: looked at before and after."""
        self._check_model(version, state)
        return self._read_parameters(version, state)

    def _read_parameters(self, version: int, state: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
        yield from published_weights(self.policy.model)
        self._check_model(version, state)

    def _check_model(self, version: int, state: tuple[int, ...]) -> None:
        if self._model_state() != state:
            raise EngineStopped(
                f"a server needs the weights of version {version} again, but the policy's model has changed since. "
                "Set rollout.server.update=disk, which keeps them, or change the model only while nothing is sampled."
            )

    def _model_state(self) -> tuple[int, ...]:
        """Changes with every change in place of a parameter."""
        return tuple(parameter._version for parameter in self.policy.model.parameters())


async def _build_fleet(options: ServerOptions, policy: Policy) -> Fleet:
    return Fleet(options, policy)


def _answer_nothing(request: Request, version: int) -> Result:
    return Result(request.id, np.empty(0, np.int32), np.empty(0, np.float32), "length", version)
