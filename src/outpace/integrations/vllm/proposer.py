"""Proposer: outpace's token-only drafters inside vLLM, as ``custom_class`` of its speculative_config.

vLLM calls ``propose`` after every step with the tokens that each row has gained, and verifies one path per row. Rows of
a prompt that is still being read come as ``[]``; near the end of the context it does not call at all. The draft of a
row is as long as gains by the acceptance that this request has had and by what rows have cost in the engine's own
steps, and empty where none gains. Drafts are functions of the tokens before them, so the output distribution is that of
the model whatever is drafted.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.core.sampling import Sampler, SamplingParams
from outpace.core.tree import TokenTree
from outpace.integrations.vllm.earlier_answers import EarlierAnswers
from outpace.integrations.vllm.proposer_options import NAMESPACE, ProposerOptions
from outpace.integrations.vllm.running_requests import Running, RunningRequests, Tokens, known_tokens
from outpace.integrations.vllm.step_costs import RENEW, StepCosts
from outpace.integrations.vllm.token_methods import build_drafter
from outpace.targets.base import Sequence, TreeScores

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_log = logging.getLogger(__name__)


class SeenTokens:
    """What stays of a round's scores where an engine shows tokens alone: the tree, and how many tokens there were."""

    logits = ()

    def __init__(self, tree: TokenTree, length: int) -> None:
        self.tree, self.length, self.nodes = tree, length, len(tree)


class Proposer:
    """``vllm_config``: vLLM's. Raises BadInput for a version of vLLM that is not supported, and for wrong options."""

    def __init__(self, vllm_config: Any) -> None:
        from outpace.integrations.vllm.plugin import check_running_version, show_runner

        check_running_version()
        options = ProposerOptions.of(getattr(vllm_config, "additional_config", None))
        self.options = options
        self.most = int(vllm_config.speculative_config.num_speculative_tokens)
        self.context = int(vllm_config.model_config.max_model_len)
        self.vocab_size = int(vllm_config.model_config.get_vocab_size())
        self.drafter = build_drafter(options, self.vocab_size)
        self.requests = RunningRequests(2 * int(vllm_config.scheduler_config.max_num_seqs))
        self.costs = StepCosts()
        self.earlier = EarlierAnswers(options.remember)
        self.runner: Any = None
        """vLLM's model runner, which knows the requests' ids; None where it is not shown."""
        self._budgets: dict[tuple[int, int], Budget] = {}
        """By the draft tokens that there is room for, and the rows of the step; until costs are renewed."""
        self._calls = 0
        self._returned: float | None = None
        self._rows = 0
        show_runner()
        _log.info("outpace drafts with %s, at most %d tokens a round", options.method, self.most)

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is no model to load."""

    def propose(
        self,
        sampled_token_ids: Seq[Seq[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],
        token_ids_cpu: Tokens,
        slot_mappings: Any = None,
        **_: Any,
    ) -> list[list[int]]:
        """A path of draft tokens for every row; [] for rows that have no new token.

        ``sampled_token_ids``: what each row has gained in this step; ``num_tokens_no_spec`` (rows,): how many tokens
        each row has, and ``token_ids_cpu`` (rows, context): which.
        """
        now = perf_counter()
        names = self._names(len(sampled_token_ids))
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        self.requests.began_call()
        self._learn_costs(now, sampled_token_ids)
        known = () if self.runner is None else self.runner.requests
        for gone in self.requests.gone(names, known):  # before others begin: these may copy from their answers
            self._end(gone)
        rows: list[tuple[int, Running]] = []
        continued: list[Running] = []
        verdicts: list[Verdict] = []
        for index, sampled in enumerate(sampled_token_ids):
            if not len(sampled):
                continue
            count, row = int(num_tokens_no_spec[index]), token_ids_cpu[index]
            name = None if names is None else names[index]
            one = self.requests.find(name, index, row, count)
            if one is None:
                one = self._begin(name, index, row, count, len(sampled))
            else:
                before = one.length
                fresh = one.take(row, count)
                one.sequence.tokens.extend(fresh)
                if not one.answered:
                    continued.append(one)
                    verdicts.append(_verdict(one.drafted, before, fresh))
                    one.answered = True
            if count + 1 < self.context:
                rows.append((index, one))
        if continued:
            self.drafter.observe_batch([one.state for one in continued], verdicts)
        if rows:
            others = len(sampled_token_ids)
            budgets = [self._budget(one.length, others) for _, one in rows]
            trees = self.drafter.propose_batch([one.state for _, one in rows], budgets)
            for (index, one), tree, budget in zip(rows, trees, budgets, strict=True):
                one.drafted, one.answered = tree, False
                drafts[index] = best_path(tree, budget)
        self._rows = len(drafts) + sum(map(len, drafts))
        self._returned = perf_counter()
        return drafts

    def _names(self, rows: int) -> list[str] | None:
        """The requests' ids by row, where the runner shows them."""
        if self.runner is None:
            return None
        names = self.runner.input_batch.req_ids
        return names if len(names) >= rows else None

    def _begin(self, name: str | None, index: int, row: Tokens, count: int, sampled: int) -> Running:
        params, namespace = self._asked(name)
        prompt: list[int] = row[: count - sampled].tolist() or row[:count].tolist()
        references = self.earlier.texts(namespace, greedy=params.greedy)
        sequence = Sequence(
            row[:count].tolist(),
            len(prompt),
            None,
            Sampler(params, (), self.vocab_size),
            references=references,
            namespace=namespace,
        )
        one = Running(sequence, self.drafter.begin(sequence), known_tokens(row, count), count, index)
        self.requests.add(name, one)
        return one

    def _asked(self, name: str | None) -> tuple[SamplingParams, str]:
        """The request's temperature and namespace, as far as the runner shows them."""
        params, namespace = SamplingParams(), self.options.namespace
        request = None if name is None else self.runner.requests.get(name)
        asked = getattr(request, "sampling_params", None)
        if asked is not None:
            if float(asked.temperature or 0.0) > 0.0:
                params = SamplingParams(temperature=1.0)  # all that matters to drafters of this kind
            named = (asked.extra_args or {}).get(NAMESPACE)
            namespace = namespace if named is None else str(named)
        return params, namespace

    def _budget(self, length: int, others: int) -> Budget:
        depth = max(0, min(self.most, self.context - length - 1))
        found = self._budgets.get((depth, others))
        if found is None:
            costs = self.costs.relative(others, depth) if self.options.adaptive else ()
            found = Budget(depth, max_nodes=depth, relative_costs=costs, base_tokens=float(others))
            self._budgets[depth, others] = found
        return found

    def _learn_costs(self, now: float, sampled: Seq[Seq[int]]) -> None:
        """The step that has just ended, unless it read prompts or there was nothing to do before it."""
        self._calls += 1
        if self._calls % RENEW == 0:
            self.costs.renew()
            self._budgets.clear()
        if self._returned is not None and self._rows and all(map(len, sampled)):
            self.costs.saw(self._rows, now - self._returned)

    def _end(self, one: Running) -> None:
        self.earlier.add(one.sequence)
        self.drafter.end(one.state)


def _verdict(drafted: TokenTree, before: int, fresh: Seq[int]) -> Verdict:
    """The engine's verdict on a draft, read from the tokens that came after it."""
    path = tuple(drafted.follow(fresh))[: max(0, len(fresh) - 1)]
    scores = cast(TreeScores, SeenTokens(drafted, before))
    return Verdict(path, fresh[-1] if fresh else 0, scores, tuple(fresh))


def best_path(tree: TokenTree, budget: Budget) -> list[int]:
    """The tokens of the path of a tree with the most expected tokens, as far as they gain."""
    parents, probs = tree.parents, tree.path_acceptance_probs
    if tree.is_chain:
        return tree.tokens[: budget.best_draft_size(probs)]
    value, best = list(probs), [-1] * len(tree)
    top, first = 0.0, -1
    for node in range(len(tree) - 1, -1, -1):
        parent = parents[node]
        if parent < 0:
            if value[node] >= top:
                top, first = value[node], node
        elif probs[parent] + value[node] > value[parent]:
            value[parent], best[parent] = probs[parent] + value[node], node
    path = []
    while first >= 0:
        path.append(first)
        first = best[first]
    size = budget.best_draft_size([probs[node] for node in path])
    return [tree.tokens[node] for node in path[:size]]
