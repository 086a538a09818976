"""What every target must do, against plain references. Test modules run it on the targets they build."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from outpace.core.auxiliary_token import AuxiliaryToken
from outpace.core.tree import ROOT, TokenTree
from outpace.targets.base import Sequence, Target
from outpace.targets.sub_graph import SubGraph

VOCAB = 97
LAYERS = 4
TOLERANCE = 2e-4  # float32, logits of size ten

_TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,  # large enough that every layer matters
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LOCAL = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


def tiny_config(architecture: str) -> Any:
    """A configuration of a few thousand weights."""
    import transformers as hf

    plain = {key: value for key, value in _TINY.items() if key != "num_key_value_heads"}
    return {
        "llama": lambda: hf.LlamaConfig(**_TINY),
        "qwen2": lambda: hf.Qwen2Config(**_TINY),
        "qwen3": lambda: hf.Qwen3Config(**_TINY, head_dim=16),
        "mistral": lambda: hf.MistralConfig(**_TINY, sliding_window=6),
        "gemma3": lambda: hf.Gemma3TextConfig(**_TINY, head_dim=16, sliding_window=5, layer_types=_LOCAL),
        "gemma2": lambda: hf.Gemma2Config(
            **_TINY, head_dim=16, sliding_window=5, layer_types=_LOCAL, attn_logit_softcapping=5.0
        ),
        "phi3": lambda: hf.Phi3Config(**_TINY),
        "gpt_neox": lambda: hf.GPTNeoXConfig(**plain),
        "gpt2": lambda: hf.GPT2Config(
            n_embd=32, n_layer=LAYERS, n_head=4, vocab_size=VOCAB, n_positions=256, initializer_range=0.4,
            bos_token_id=1, eos_token_id=2,
        ),
    }[architecture]()  # fmt: skip


ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral", "gemma3", "gemma2", "phi3", "gpt_neox", "gpt2"]


def tiny_model(architecture: str, seed: int = 0) -> Any:
    """A random float32 model of one architecture."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(tiny_config(architecture)).float().eval()


def random_tree(nodes: int, rng: random.Random) -> TokenTree:
    """A tree of random shape."""
    tree = TokenTree()
    for _ in range(nodes):
        tree.add(rng.randrange(-1, len(tree)), rng.randrange(VOCAB))
    return tree


def random_tokens(count: int, rng: random.Random) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def reference(model: Any, tokens: list[int]) -> Tensor:
    """Logits after the last token, by the model's own forward over the whole sequence."""
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
    return logits


def masked_reference(model: Any, tokens: list[int], positions: list[int], seen: Tensor) -> Tensor:
    """All logits, by the model's own forward with an explicit (n, n) attention mask and positions."""
    mask = torch.zeros(1, 1, *seen.shape).masked_fill(~seen, float("-inf"))
    with torch.inference_mode():
        logits: Tensor = model(
            input_ids=torch.tensor([tokens]),
            attention_mask=mask,
            position_ids=torch.tensor([positions]),
            use_cache=False,
        ).logits[0]
    return logits


def opened(target: Target, tokens: list[int]) -> Sequence:
    sequence = target.sequence(tokens)
    target.prefill([sequence])
    return sequence


def near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.float(), expected.float(), atol=TOLERANCE, rtol=TOLERANCE)


def without(model: Any, attention: set[int] = frozenset(), mlp: set[int] = frozenset()) -> Any:  # type: ignore[assignment]
    """A Llama whose named sublayers write zeros to the residual stream."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for layer in attention:
            twin.model.layers[layer].self_attn.o_proj.weight.zero_()
        for layer in mlp:
            twin.model.layers[layer].mlp.down_proj.weight.zero_()
    return twin


def kept_layers(model: Any, layers: range) -> Any:
    """A Llama of some of its layers."""
    twin = copy.deepcopy(model)
    twin.model.layers = torch.nn.ModuleList(twin.model.layers[i] for i in layers)
    for index, layer in enumerate(twin.model.layers):
        layer.self_attn.layer_idx = index
    twin.config.num_hidden_layers = len(layers)
    return twin


Build = Callable[[Any], Target]


class PerArchitecture:
    """A model of every architecture, and a target of a copy. Subclasses set ``build``."""

    build: Build
    architectures: tuple[str, ...] = tuple(ARCHITECTURES)

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        if "architecture" in metafunc.fixturenames:
            metafunc.parametrize("architecture", cls.architectures)

    @pytest.fixture
    def case(self, architecture: str) -> tuple[Any, Target]:
        model = tiny_model(architecture)
        return copy.deepcopy(model), type(self).build(model)


class KVMemory(PerArchitecture):
    """What is copied between sequences, and how much memory they take."""

    def test_copied_blocks_of_kv_stand_for_a_prefill(self, case: tuple[Any, Target]) -> None:
        _, target = case
        assert target.kv_blocks
        rng = random.Random(3)
        whole = opened(target, random_tokens(45, rng))
        other = target.sequence(whole.tokens)
        for start, stop in ((0, 16), (16, 32)):
            target.append_kv(other.kv, target.kv_block(whole.kv, start, stop), stop - start)
        assert target.length(other.kv) == 32
        target.prefill([other])
        scores = target.score([(one, TokenTree.chain([3, 4])) for one in (whole, other)])
        near(scores[0].logits, scores[1].logits)
        for start, stop in ((8, 24), (32, 48), (16, 16)):
            with pytest.raises(ValueError, match="are no block of 44 committed rows"):
                target.kv_block(whole.kv, start, stop)

    def test_memory_is_known_beforehand(self, case: tuple[Any, Target]) -> None:
        _, target = case
        rng = random.Random(3)
        sequence = opened(target, random_tokens(45, rng))
        planned = target.kv_bytes(sequence.kv, 400)
        assert 0 < target.kv_bytes(sequence.kv) <= planned
        target.lengthen(sequence, [5] * 150)
        assert target.kv_bytes(sequence.kv) <= planned


class TreeScoring(PerArchitecture):
    """Ragged trees in a batch, commits, forks."""

    def test_trees_score_as_sequences_and_commits_as_prefill(self, case: tuple[Any, Target]) -> None:
        model, target = case
        rng = random.Random(7)
        sequences = [target.sequence(random_tokens(count, rng)) for count in (21, 5, 1)]
        target.prefill(sequences)
        for _ in range(4):
            trees = [random_tree(rng.randrange(9), rng) for _ in sequences]
            scores = target.score(list(zip(sequences, trees, strict=True)))
            paths = []
            for part in scores.parts:
                for node in (ROOT, *range(len(part.tree))):
                    tokens = part.sequence.tokens + part.tree.path_tokens(node)
                    near(part.logits[node + 1], reference(model, tokens))
                paths.append(part.tree.path(rng.choice([ROOT, *range(len(part.tree))])))
            target.commit(scores, paths)
            for sequence, tree, path in zip(sequences, trees, paths, strict=True):
                sequence.tokens += [tree.tokens[node] for node in path] + [rng.randrange(VOCAB)]
                assert target.length(sequence.kv) == len(sequence.tokens) - 1
        for sequence in sequences:
            fresh = opened(target, sequence.tokens)
            tree = random_tree(6, rng)
            scores = target.score([(sequence, tree), (fresh, tree)])
            near(scores[0].logits, scores[1].logits)

    def test_long_prompts_prefill_in_chunks(self, case: tuple[Any, Target]) -> None:
        model, target = case
        rng = random.Random(3)
        assert target.prefill_chunk < 40  # type: ignore[attr-defined]
        tokens = [random_tokens(count, rng) for count in (61, 17, 40)]
        sequences = [target.sequence(one) for one in tokens]
        target.prefill(sequences)
        for sequence in sequences:
            near(target.score([(sequence, TokenTree())])[0].logits[0], reference(model, sequence.tokens))

    def test_prompts_are_read_in_portions(self, case: tuple[Any, Target]) -> None:
        _, target = case
        rng = random.Random(3)
        tokens = [random_tokens(count, rng) for count in (45, 2, 30)]
        whole = [opened(target, one) for one in tokens]
        sequences = [target.sequence(one) for one in tokens]
        lengths = []
        for most in (7, 1, 50, 100):
            target.prefill(sequences, most=most)
            lengths.append([target.length(one.kv) for one in sequences])
        assert lengths == [[7, 0, 0], [8, 0, 0], [44, 1, 13], [44, 1, 29]]
        scores = target.score([(one, TokenTree.chain([3, 4])) for one in (*whole, *sequences)])
        for at in range(3):
            near(scores[at].logits, scores[at + 3].logits)

    def test_score_is_pure_and_dropped_scores_leave_no_trace(self, case: tuple[Any, Target]) -> None:
        _, target = case
        rng = random.Random(5)
        sequence = opened(target, random_tokens(12, rng))
        tree = random_tree(7, rng)
        kept = target.score([(sequence, tree)])
        for _ in range(3):
            target.score([(sequence, random_tree(9, rng))])
        near(target.score([(sequence, tree)])[0].logits, kept[0].logits)
        leaf = max(range(len(tree)), key=lambda node: tree.depths[node])
        target.commit(kept, [tree.path(leaf)])  # its K/V is its own, whatever ran since
        sequence.tokens += [*tree.path_tokens(leaf), 3]
        near(
            target.score([(sequence, TokenTree())])[0].logits,
            target.score([(opened(target, sequence.tokens), TokenTree())])[0].logits,
        )

    def test_fork_of_a_prefix(self, case: tuple[Any, Target]) -> None:
        model, target = case
        rng = random.Random(11)
        first = opened(target, random_tokens(20, rng))
        other = first.tokens[:9] + random_tokens(6, rng)
        second = target.sequence(other, kv=target.fork(first.kv, 9))
        target.prefill([second])
        tree = random_tree(5, rng)
        scores = target.score([(first, tree), (second, tree)])
        near(scores[0].logits[0], reference(model, first.tokens))
        near(scores[1].logits[0], reference(model, second.tokens))

    def test_taps_are_the_residual_stream(self, case: tuple[Any, Target]) -> None:
        _, target = case
        rng = random.Random(2)
        sequence = target.sequence(random_tokens(30, rng))
        chunks: dict[int, list[Tensor]] = {}
        starts: list[int] = []

        def keep(_: Sequence, start: int, hidden_states: Any) -> None:
            starts.append(start)
            for layer, rows in hidden_states.items():
                chunks.setdefault(layer, []).append(rows)

        target.prefill([sequence], (1, LAYERS), keep)
        tree = random_tree(4, rng)
        scores = target.score([(sequence, tree)], aux_hidden_state_layers=(1, LAYERS))
        near(target.lm_head(scores[0].hidden_states[LAYERS]), scores[0].logits)
        assert scores[0].hidden_states[1].shape == (5, target.hidden_size)
        assert starts == sorted(starts)
        assert torch.cat(chunks[1]).shape == (29, target.hidden_size)
        # A prefix scored as a chain has the states that prefill streamed.
        short = target.sequence(sequence.tokens[:1])
        chain = target.score([(short, TokenTree.chain(sequence.tokens[1:29]))], aux_hidden_state_layers=(1,))
        near(torch.cat(chunks[1]), chain[0].hidden_states[1])


class Attended(NamedTuple):
    """A forward with attention written out: ``queries`` (layers, heads, n, d), ``keys`` (layers, kv_heads, n, d)."""

    logits: Tensor
    queries: Tensor
    keys: Tensor


def attention_by_hand(model: Any, tokens: list[int], positions: list[int], seen: Tensor) -> Attended:
    """The model's own forward, but for its attention: row i of head h in layer l sees what ``seen``, bool (layers,
    kv_heads, n, n), says, and no further than the layer's window."""
    from transformers import AttentionInterface

    at = torch.tensor(positions)
    reach = at[:, None] - at
    found: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        found[module.layer_idx] = query[0], key[0]
        visible = seen[module.layer_idx]
        if sliding_window:
            visible = visible & (reach < sliding_window)
        groups = query.shape[1] // key.shape[1]
        keys, values, shown = (one.repeat_interleave(groups, 0) for one in (key[0], value[0], visible))
        logits = query[0] @ keys.transpose(1, 2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        weights = logits.masked_fill(~shown, float("-inf")).softmax(-1)
        return (weights @ values).transpose(0, 1)[None], None

    AttentionInterface.register("by_hand", attend)
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "by_hand"
    with torch.inference_mode():
        ids, where = torch.tensor([tokens]), torch.tensor([positions])
        logits = twin(input_ids=ids, position_ids=where, use_cache=False).logits[0]
    queries, keys = (torch.stack([found[layer][which] for layer in range(LAYERS)]) for which in (0, 1))
    return Attended(logits, queries, keys)


class KVChoice(PerArchitecture):
    """Keys, queries, and subsets of K/V that differ from layer to layer and head to head.

    Against the model's own forward with attention written out.
    """

    @staticmethod
    def causal(count: int, heads: int) -> Tensor:
        return torch.ones(LAYERS, heads, count, count, dtype=torch.bool).tril()

    def test_keys_and_queries_are_those_of_attention(self, case: tuple[Any, Target]) -> None:
        model, target = case
        rng = random.Random(21)
        sequences = [opened(target, random_tokens(count, rng)) for count in (37, 3)]
        before = [target.length(one.kv) for one in sequences]
        for sequence, queries in zip(sequences, target.queries(sequences), strict=True):
            count = len(sequence.tokens)
            heads = target.keys(sequence.kv, 0, 1).shape[1]
            exact = attention_by_hand(model, sequence.tokens, list(range(count)), self.causal(count, heads))
            size = exact.keys.shape[-1]
            near(queries[..., :size], exact.queries[:, :, -1])
            for start, stop in ((0, count - 1), (1, 2), (0, 0), (min(19, count - 1), count - 1)):
                keys = target.keys(sequence.kv, start, stop)
                near(keys[..., :size], exact.keys[:, :, start:stop])
                assert keys.shape[-1] == queries.shape[-1]
                assert not keys[..., size:].any(), "padding adds nothing to a product"
        assert [target.length(one.kv) for one in sequences] == before

    def test_every_layer_and_head_reads_its_own_subset(self, case: tuple[Any, Target]) -> None:
        model, target = case
        rng = random.Random(22)
        for nodes in (0, 3, 9):  # few rows and many take different paths through attention
            sequence, other = (opened(target, random_tokens(count, rng)) for count in (30, 6))
            tree, length = random_tree(nodes, rng), 29
            heads = target.keys(sequence.kv, 0, 1).shape[1]
            chosen = [[sorted(rng.sample(range(length), 7)) for _ in range(heads)] for _ in range(LAYERS)]
            subset = torch.tensor(chosen)
            batch = [(sequence, tree), (other, TokenTree.chain([1, 2]))]
            scores = target.score(batch, graph=SubGraph(kv={0: subset}))
            rows = 1 + nodes
            seen = self.causal(length + rows, heads).clone()
            seen[:, :, length:, :length] = False
            for layer in range(LAYERS):
                for head in range(heads):
                    seen[layer, head, length:, chosen[layer][head]] = True
            seen[:, :, length:, length:] = tree.ancestor_mask()
            positions = [*range(length), *(length + at for at in tree.positions())]
            exact = attention_by_hand(model, [*sequence.tokens, *tree.tokens], positions, seen)
            near(scores[0].logits, exact.logits[length:])
            near(scores[1].logits[2], reference(model, [*other.tokens, 1, 2]))
            # A choice that is the same everywhere is that of all layers and heads alike.
            alike = subset[0, 0].expand(LAYERS, heads, -1)
            one, same = (target.score([(sequence, tree)], graph=SubGraph(kv={0: kv})) for kv in (alike, subset[0, 0]))
            near(one[0].logits, same[0].logits)
            # The pass is resumed under the same choice.
            graph = SubGraph(kv={0: subset})
            short = TokenTree.chain([])
            grown = target.score([(sequence, short)], graph=graph)
            grown = target.score([(sequence, tree)], graph=graph, resume=grown)
            near(grown[0].logits, scores[0].logits)


class SubGraphs:
    """Side nodes, layer ranges, skips, K/V subsets and resume: on a Llama, against models cut by hand."""

    build: Build

    @pytest.fixture
    def case(self) -> tuple[Any, Target]:
        model = tiny_model("llama", seed=1)
        return copy.deepcopy(model), type(self).build(model)

    def test_side_nodes(self, case: tuple[Any, Target]) -> None:
        model, target = case
        rng = random.Random(4)
        sequence = opened(target, random_tokens(10, rng))
        tree = TokenTree()
        first = tree.add(ROOT, 5)
        tree.add(first, 6)
        tree.add(ROOT, 7)
        tree.auxiliary_tokens = [
            AuxiliaryToken(8, 4, (ROOT, first)),
            AuxiliaryToken(9, 2, (ROOT, 3)),  # sees the first side node
            AuxiliaryToken(0, 1, (ROOT,), embedding=torch.randn(target.hidden_size)),
        ]
        scores = target.score([(sequence, tree)])
        tokens = [*sequence.tokens, *tree.tokens, 8, 9]
        rows = 1 + len(tree) + 2
        seen = torch.zeros(9 + rows, 9 + rows, dtype=torch.bool)
        seen[:9, :9] = torch.ones(9, 9).tril().bool()
        seen[9:, :9] = True
        seen[9:, 9:] = tree.ancestor_mask()[:rows, :rows]
        positions = [*range(9), *(9 + at for at in tree.positions()[:rows])]
        near(scores[0].logits[:rows], masked_reference(model, tokens, positions, seen)[9:])
        with torch.inference_mode():
            embeddings = model.get_input_embeddings()(torch.tensor([sequence.tokens]))
            embedding = tree.auxiliary_tokens[2].embedding
            assert embedding is not None
            full = torch.cat([embeddings, embedding[None, None]], dim=1)
            expected = model(inputs_embeds=full, use_cache=False).logits[0, -1]
        near(scores[0].logits[-1], expected)
        # Rules and commit never see them.
        target.commit(scores, [[first]])
        assert target.length(sequence.kv) == 11

    @pytest.mark.parametrize("stop", [1, 3])
    def test_early_exit(self, case: tuple[Any, Target], stop: int) -> None:
        model, target = case
        sequence = opened(target, random_tokens(9, random.Random(1)))
        tree = TokenTree.chain([4, 5])
        scores = target.score([(sequence, tree)], graph=SubGraph(stop=stop))
        twin = kept_layers(model, range(stop))
        near(scores[0].logits[2], reference(twin, [*sequence.tokens, 4, 5]))

    def test_skipped_sublayers(self, case: tuple[Any, Target]) -> None:
        model, target = case
        rng = random.Random(6)
        sequence = opened(target, random_tokens(9, rng))
        # The committed K/V is the full model's, so the reference holds for a sequence without committed rows.
        lone = target.sequence(sequence.tokens[:1])
        chain = TokenTree.chain(sequence.tokens[1:])
        graph = SubGraph(skip_attention=frozenset({1, 2}), skip_mlp=frozenset({2}))
        scores = target.score([(lone, chain)], graph=graph)
        near(scores[0].logits[-1], reference(without(model, {1, 2}, {2}), sequence.tokens))

    def test_layer_range_leaves_out_the_first_layers(self, case: tuple[Any, Target]) -> None:
        model, target = case
        tokens = random_tokens(7, random.Random(8))
        lone = target.sequence(tokens[:1])
        scores = target.score([(lone, TokenTree.chain(tokens[1:]))], graph=SubGraph(start=2, stop=4))
        near(scores[0].logits[-1], reference(kept_layers(model, range(2, 4)), tokens))

    def test_subset_of_committed_keys(self, case: tuple[Any, Target]) -> None:
        model, target = case
        rng = random.Random(9)
        sequence = opened(target, random_tokens(14, rng))
        tree = random_tree(4, rng)
        subset = torch.tensor([0, 1, 7, 8, 12])
        scores = target.score([(sequence, tree)], graph=SubGraph(kv={0: subset}))
        rows = 1 + len(tree)
        seen = torch.zeros(13 + rows, 13 + rows, dtype=torch.bool)
        seen[:13, :13] = torch.ones(13, 13).tril().bool()  # the prefix itself was computed in full
        seen[13:, subset] = True
        seen[13:, 13:] = tree.ancestor_mask()
        positions = [*range(13), *(13 + at for at in tree.positions())]
        near(scores[0].logits, masked_reference(model, [*sequence.tokens, *tree.tokens], positions, seen)[13:])

    @pytest.mark.parametrize(
        "graph",
        [
            SubGraph(),
            SubGraph(stop=2),
            SubGraph(stop=3, skip_mlp=frozenset({2})),
            SubGraph(skip_attention=frozenset({1}), skip_mlp=frozenset({3})),
            SubGraph(skip_attention=frozenset({0})),
            SubGraph(start=1),
            SubGraph(kv={0: torch.tensor([0, 3]), 1: torch.tensor([1])}),
        ],
        ids=["full", "exit", "exit-skip", "skip", "skip-first", "late", "kv"],
    )
    def test_resumed_equals_fresh(self, case: tuple[Any, Target], graph: SubGraph) -> None:
        _, target = case
        rng = random.Random(10)
        batch = [opened(target, random_tokens(count, rng)) for count in (11, 4)]
        trees = [TokenTree(), TokenTree()]
        draft = target.score(list(zip(batch, trees, strict=True)), graph=graph)
        for step in range(3):  # grow the trees, the second one a round less
            grown = []
            for index, tree in enumerate(trees):
                bigger = copy.deepcopy(tree)
                if index == 0 or step < 2:
                    for _ in range(2):
                        bigger.add(rng.randrange(-1, len(bigger)), rng.randrange(VOCAB))
                grown.append(bigger)
            trees = grown
            pairs = list(zip(batch, trees, strict=True))
            draft = target.score(pairs, graph=graph, resume=draft)
            fresh = target.score(pairs, graph=graph)
            for index in range(2):
                near(draft[index].logits, fresh[index].logits)
        for tree in trees:  # the verification sees nodes that the draft pass never ran
            tree.add(len(tree) - 1, rng.randrange(VOCAB))
        pairs = list(zip(batch, trees, strict=True))
        full = target.score(pairs)
        resumed = target.score(pairs, resume=draft)
        for index in range(2):
            near(resumed[index].logits, full[index].logits)
        target.commit(resumed, [tree.path(len(tree) - 1) for tree in trees])
        for sequence, tree in pairs:
            sequence.tokens += [*tree.path_tokens(len(tree) - 1), 5]
            near(
                target.score([(sequence, TokenTree())])[0].logits,
                target.score([(opened(target, sequence.tokens), TokenTree())])[0].logits,
            )

    def test_only_full_and_current_scores_commit(self, case: tuple[Any, Target]) -> None:
        _, target = case
        sequence = opened(target, [1, 2, 3])
        draft = target.score([(sequence, TokenTree.chain([4]))], graph=SubGraph(stop=1))
        with pytest.raises(ValueError, match="full forward"):
            target.commit(draft, [[0]])
        scores = target.score([(sequence, TokenTree.chain([4]))])
        target.commit(scores, [[0]])
        sequence.tokens += [4, 5]
        with pytest.raises(ValueError, match="stale"):
            target.commit(scores, [[0]])
        with pytest.raises(ValueError, match="range"):
            target.score([(sequence, TokenTree())], graph=SubGraph(start=3, stop=9))
