"""The openai engine: ``search.engine.Engine`` over OpenAI-compatible servers, mainly vLLM."""

from __future__ import annotations

import asyncio
import itertools

from runtime.openai.completion_sampler import CompletionSampler
from runtime.openai.completion_server import CompletionServer
from runtime.openai.openai_options import OpenaiOptions, ServedModel
from runtime.openai.openai_search import OpenaiSearch
from runtime.openai.reward_requests import PathsRequest, reward_request, trial_path
from runtime.openai.sampling_fields import HONOURED
from runtime.openai.score_route import ScoreRoute
from runtime.openai.served_reward_model import ServedRewardModel
from runtime.openai.server_trials import ask_trial, dialect_of, say
from runtime.reward_format import reward_format
from runtime.servers.fleet import Fleet
from runtime.servers.policy_scorers import LikelihoodScorer, PolicyJudge
from runtime.servers.served_engine import ServedEngine, ServedScorer, fingerprint_of
from runtime.servers.server_errors import WrongServer
from runtime.text import Text
from search.engine import Capabilities, EngineError

MOST_TEMPERATURE = 2.0
"""OpenAI's limit; vLLM refuses higher ones."""


class OpenaiEngine(ServedEngine[OpenaiSearch, CompletionServer, CompletionSampler]):
    """An engine on servers with OpenAI's completions API."""

    def __init__(self, options: OpenaiOptions) -> None:
        """Raises ValueError or RewardMissing for options that cannot be met."""
        super().__init__(
            options, reward_format(options.reward_format), Text(options.policy.checkpoint)
        )
        self._options = options
        reward = options.reward if self._form.needs_model else None
        self._reward_text = Text(reward.checkpoint) if reward else None
        self._request: PathsRequest | None = (
            reward_request(self._form, self._reward_text, self._text) if self._reward_text else None
        )
        self._policy = self._fleet("policy", options.policy)
        scoring_model = reward or (options.reward if self._form.by_score_route else None)
        self._rewards = self._fleet("reward", scoring_model)
        self._score_route = ScoreRoute(self._rewards) if self._form.by_score_route else None
        self._numbers = itertools.count()

    @classmethod
    async def start(cls, options: OpenaiOptions) -> OpenaiEngine:
        """Make an engine and ``connect`` it. Raises what either raises."""
        return await cls(options).connect()

    async def _end(self, search: OpenaiSearch) -> None:
        await search.stop()
        self._charge(search)
        tree = search.tree
        await asyncio.gather(self._policy.release(tree), self._rewards.release(tree))

    def _search(self, tree: str) -> OpenaiSearch:
        if tree not in self._searches:
            self._searches[tree] = OpenaiSearch(tree, next(self._numbers))
        return self._searches[tree]

    def _fleet(self, kind: str, model: ServedModel | None) -> Fleet[CompletionServer]:
        """The servers of a kind; no server if ``model`` is None."""
        options = self._options
        servers = [
            CompletionServer(
                url,
                options.times,
                model.name,
                model.all_headers(),
                self._try_policy if kind == "policy" else self._try_reward,
                setting=f"{kind}_name",
            )
            for model in ([model] if model else [])
            for url in model.urls
        ]
        return Fleet(kind, servers, options.recovery_seconds, self._routing)

    async def _try_policy(self, server: CompletionServer) -> None:
        """Find out the server's dialect; log what it lacks the first time."""
        dialect = await dialect_of(server, self._text)
        if server.dialect is None:
            say(server, dialect)
        server.dialect = dialect

    async def _try_reward(self, server: CompletionServer) -> None:
        """Check that the server gives rewards in the format. Raises WrongServer."""
        if self._score_route is not None:
            return await self._score_route.try_out(server)
        assert self._request is not None, "a reward server is asked in a format"
        body = self._request.body([trial_path(self._request)])
        answer = await ask_trial(server, self._request.route, body)
        try:
            self._request.rewards(answer)
        except EngineError as error:
            raise WrongServer(f"{server.url}: {error}") from error

    def _build(self) -> None:
        options = self._options
        context = _context(self._policy, self._text)
        self._sampler = CompletionSampler(self._policy, self._text, context=context)
        self._scorer = self._make_scorer()
        dialects = [server.dialect for server in self._policy.replicas if server.dialect]
        logprobs = all(dialect.logprobs for dialect in dialects)
        likelihood = isinstance(self._scorer, LikelihoodScorer)
        route = self._score_route
        repeats = route is None or route.repeats
        models = {"policy": str(options.policy.checkpoint)}
        if self._reward_text is not None:
            models["prm"] = str(self._reward_text.checkpoint)
        self._capabilities = Capabilities(
            engine="openai",
            models=models,
            exact=False,
            seeded=all(dialect.seeds for dialect in dialects) and repeats,
            scores=logprobs or not likelihood,
            embeds=options.embedder,
            context_tokens=context,
            fingerprint=fingerprint_of(
                "openai", options, self._form, [server.model for server in self.replicas]
            ),
            score_tokens=self._overhead(self._request.paths if self._request else None),
            scored_tokens=_context(self._rewards, self._reward_text) if self._reward_text else 0,
            outcome=self._form.outcome or (route is not None and route.outcome),
            likelihood=likelihood,
            step_logprobs=logprobs,
            most_temperature=MOST_TEMPERATURE,
            logits_params=HONOURED if all(server.vllm for server in self._policy.replicas) else (),
            grammar=all(dialect.grammar for dialect in dialects),
            grammar_at_once=True,
        )

    def _make_scorer(self) -> ServedScorer[OpenaiSearch]:
        if self._judge is not None:
            return PolicyJudge(self._sampler, self._judge)
        if self._score_route is not None:
            return self._score_route
        if self._request is None or self._reward_text is None:
            return LikelihoodScorer(self._sampler)
        context = _context(self._rewards, self._reward_text)
        return ServedRewardModel(self._rewards, self._request, context=context)


def _context(fleet: Fleet[CompletionServer], text: Text) -> int:
    """The most tokens that the model and all servers accept."""
    return min([text.context, *(server.context for server in fleet.replicas if server.context)])
