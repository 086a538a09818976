"""TokenTree against naive references: nodes are unique, draws are kept in order, masks follow from parents."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from outpace.core.auxiliary_token import AuxiliaryToken
from outpace.core.errors import BadInput
from outpace.core.q_row import QRow
from outpace.core.tree import DETERMINISTIC, ROOT, Draw, TokenTree

Drawn = list[tuple[int, int]]


@st.composite
def draws(draw: st.DrawFn, vocab: int = 3, most: int = 12) -> Drawn:
    """A list of (index of an earlier draw or ROOT, token)."""
    return [
        (draw(st.integers(ROOT, count - 1)), draw(st.integers(0, vocab - 1)))
        for count in range(draw(st.integers(0, most)))
    ]


def grown(drawn: Drawn) -> tuple[TokenTree, list[tuple[int, ...]]]:
    """The tree of the draws, and the token path that each draw leads to."""
    tree = TokenTree()
    nodes: list[int] = []
    paths: list[tuple[int, ...]] = []
    for before, token in drawn:
        parent = ROOT if before == ROOT else nodes[before]
        nodes.append(tree.add(parent, token))
        paths.append((*(() if before == ROOT else paths[before]), token))
    return tree, paths


@given(draws())
def test_nodes_are_the_distinct_paths_in_order_of_first_appearance(drawn: Drawn) -> None:
    tree, paths = grown(drawn)
    distinct = list(dict.fromkeys(paths))
    assert len(tree) == len(distinct)
    assert [tuple(tree.path_tokens(node)) for node in range(len(tree))] == distinct
    assert tree.depths == [len(path) for path in distinct]
    assert all(parent < node for node, parent in enumerate(tree.parents))
    assert tree.path_tokens(ROOT) == [] == tree.path(ROOT)
    for node in range(len(tree)):
        assert tree.path(node)[-1] == node
        assert [tree.tokens[other] for other in tree.path(node)] == tree.path_tokens(node)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.0, 1.0)), max_size=8))
def test_a_chain_is_what_adding_its_tokens_makes(drawn: list[tuple[int, float]]) -> None:
    tokens, probs = [token for token, _ in drawn], [prob for _, prob in drawn]
    tree = TokenTree()
    for token, prob in drawn:
        tree.add(len(tree) - 1, token, path_acceptance_prob=prob)
    chain = TokenTree.chain(tokens, path_acceptance_probs=probs)
    assert chain == tree
    assert chain.follow(tokens) == list(range(len(tokens)))
    assert TokenTree.chain(tokens).path_acceptance_probs == [1.0] * len(tokens)


@given(draws())
def test_draws_stay_in_the_order_in_which_they_were_made(drawn: Drawn) -> None:
    tree, paths = grown(drawn)
    assert [tuple(tree.path_tokens(draw.node)) for draw in tree.draws] == paths
    for draw in tree.draws:
        assert tree.parents[draw.node] == draw.parent
        assert tree.tokens[draw.node] == draw.token
        assert tree.child(draw.parent, draw.token) == draw.node
    for node in range(ROOT, len(tree)):
        assert tree.draws_at(node) == [draw for draw in tree.draws if draw.parent == node]
        assert tree.children(node) == [child for child, parent in enumerate(tree.parents) if parent == node]
        assert tree.child(node, 99) is None


def test_follow_spells_tokens_from_the_root_as_far_as_there_are_nodes() -> None:
    tree = TokenTree.chain([5, 6, 7])
    other = tree.add(0, 8)
    assert tree.follow([5, 6, 7, 9]) == [0, 1, 2]
    assert tree.follow([5, 8]) == [0, other]
    assert tree.follow([6, 7]) == tree.follow([]) == []


@given(draws())
def test_leaves_and_shape(drawn: Drawn) -> None:
    tree, _ = grown(drawn)
    leaves = [node for node in range(len(tree)) if node not in tree.parents]
    assert list(tree.leaves()) == (leaves or [ROOT])
    one_child_each = all(tree.parents.count(node) <= 1 for node in range(ROOT, len(tree)))
    assert tree.is_chain == (one_child_each and len(tree.draws) == len(tree))
    assert tree.positions() == [0, *tree.depths]
    assert tree.row_tokens(7) == [7, *tree.tokens]


@given(draws())
def test_ancestor_mask_sees_the_root_the_path_and_itself(drawn: Drawn) -> None:
    tree, _ = grown(drawn)
    mask = tree.ancestor_mask()
    assert mask.dtype == torch.bool
    assert mask.shape == (1 + len(tree), 1 + len(tree))
    for row in range(ROOT, len(tree)):
        seen = {ROOT, *tree.path(row)}
        assert {column - 1 for column in mask[row + 1].nonzero().flatten().tolist()} == seen


def test_side_nodes_see_what_they_say_and_nobody_sees_them() -> None:
    tree = TokenTree.chain([1, 2])
    tree.auxiliary_tokens = [AuxiliaryToken(5, 1), AuxiliaryToken(6, 3, attends=(ROOT, 0, 2))]
    mask = tree.ancestor_mask().int().tolist()
    assert mask == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 1, 0], [1, 1, 0, 1, 1]]
    assert tree.positions() == [0, 1, 2, 1, 3]
    assert tree.row_tokens(9) == [9, 1, 2, 5, 6]


@given(st.lists(draws(most=6), max_size=4))
def test_merge_keeps_every_draw_in_order_over_united_nodes(all_drawn: list[Drawn]) -> None:
    trees, paths = [], []
    for drawn in all_drawn:
        tree, some = grown(drawn)
        trees.append(tree)
        paths += some
    merged = TokenTree.merge(trees)
    assert [tuple(merged.path_tokens(draw.node)) for draw in merged.draws] == paths
    assert len(merged) == len(set(paths))


def test_merge_carries_q_rows_and_whether_draws_were_replaced() -> None:
    rows = [QRow(torch.tensor([0.1, 0.9])), QRow(torch.tensor([0.5, 0.5])), QRow(torch.tensor([1.0, 0.0]))]
    one = TokenTree.chain([1, 0], rows[:2])
    two = TokenTree()
    two.add(ROOT, 1)
    two.add(ROOT, 0, rows[2])
    two.replacement = False
    merged = TokenTree.merge([one, two])
    assert merged.draws == [Draw(-1, 1, 0, 0), Draw(0, 0, 1, 1), Draw(-1, 1, 0, DETERMINISTIC), Draw(-1, 0, 2, 2)]
    assert [id(row) for row in merged.q_rows] == [id(row) for row in rows]
    assert not merged.replacement
    assert TokenTree.merge([one]).replacement
    assert len(TokenTree.merge([])) == 0


def test_siblings_share_a_row_and_two_draws_may_share_a_node() -> None:
    tree = TokenTree()
    first = tree.add(ROOT, 1, QRow(torch.tensor([0.2, 0.8])))
    assert tree.add(ROOT, 1, 0) == first
    assert len(tree) == 1
    assert [draw.q_row for draw in tree.draws] == [0, 0]
    assert not tree.is_chain
    assert not tree.is_deterministic
    assert TokenTree.chain([1, 2]).is_deterministic


def test_trees_that_make_no_sense_are_refused() -> None:
    tree = TokenTree.chain([1])
    for parent in (-2, 1):
        with pytest.raises(BadInput, match="no node"):
            tree.add(parent, 0)


# -------------------------------------------------------------------------------------------------- auxiliary tokens


@st.composite
def with_side(draw: st.DrawFn) -> TokenTree:
    """A tree with auxiliary tokens that see the root, any of its nodes and any earlier auxiliary token."""
    tree, _ = grown(draw(draws(most=5)))
    for number in range(draw(st.integers(0, 3))):
        seen = draw(st.sets(st.integers(ROOT, len(tree) + number - 1)))
        tree.auxiliary_tokens.append(
            AuxiliaryToken(draw(st.integers(0, 2)), draw(st.integers(1, 5)), tuple(seen), owner=object())
        )
    return tree


def what_rows_see(tree: TokenTree) -> dict[object, set[object]]:
    """Rows of the forward under names that do not change in a merge: a node's path, a side node's owner."""
    names: list[object] = [(), *(tuple(tree.path_tokens(node)) for node in range(len(tree)))]
    names += [side.owner for side in tree.auxiliary_tokens]
    mask = tree.ancestor_mask().tolist()
    return {
        name: {names[column] for column, sees in enumerate(row) if sees} for name, row in zip(names, mask, strict=True)
    }


@given(st.lists(with_side(), max_size=4))
def test_side_nodes_see_after_a_merge_what_they_saw_before(trees: list[TokenTree]) -> None:
    merged = TokenTree.merge(trees)
    seen = what_rows_see(merged)
    for tree in trees:
        for name, view in what_rows_see(tree).items():
            assert seen[name] == view
    assert len(seen) == 1 + len(merged) + len(merged.auxiliary_tokens)
    before = [(side.owner, side.token, side.position) for tree in trees for side in tree.auxiliary_tokens]
    assert [(side.owner, side.token, side.position) for side in merged.auxiliary_tokens] == before
    assert merged.positions()[1 + len(merged) :] == [position for _, _, position in before]


# --------------------------------------------------------------------------------------------------- estimates


@given(st.lists(st.tuples(st.integers(ROOT, 9), st.integers(0, 2), st.floats(0, 1)), max_size=12))
def test_of_two_estimates_for_one_node_the_larger_stays(added: list[tuple[int, int, float]]) -> None:
    tree = TokenTree()
    largest: dict[int, float] = {}
    for parent, token, path_acceptance_prob in added:
        node = tree.add(min(parent, len(tree) - 1), token, path_acceptance_prob=path_acceptance_prob)
        largest[node] = max(path_acceptance_prob, largest.get(node, 0.0))
    assert tree.path_acceptance_probs == [largest[node] for node in range(len(tree))]


@given(st.lists(st.lists(st.floats(0, 1), max_size=4), max_size=4))
def test_estimates_survive_a_merge(chains: list[list[float]]) -> None:
    trees = []
    for number, path_acceptance_probs in enumerate(chains):
        tree, node = TokenTree(), ROOT
        for path_acceptance_prob in path_acceptance_probs:
            node = tree.add(node, number % 2, path_acceptance_prob=path_acceptance_prob)
        trees.append(tree)
    merged = TokenTree.merge(trees)
    for node in range(len(merged)):
        path = merged.path_tokens(node)
        given = [tree.path_acceptance_probs[len(path) - 1] for tree in trees if tree.tokens[: len(path)] == path]
        assert merged.path_acceptance_probs[node] == max(given)


@given(draws(), st.integers(0, 14))
def test_the_first_nodes_of_a_tree_are_a_tree(drawn: Drawn, count: int) -> None:
    tree, paths = grown(drawn)
    tree.path_acceptance_probs[:] = [1 / (1 + node) for node in range(len(tree))]
    short = tree.first(count)
    assert len(short) == min(count, len(tree)) == len(short.draws)
    assert [tuple(short.path_tokens(node)) for node in range(len(short))] == list(dict.fromkeys(paths))[:count]
    assert short.path_acceptance_probs == tree.path_acceptance_probs[:count]
    for node, parent in enumerate(short.parents):
        assert short.child(parent, short.tokens[node]) == node


def test_sampled_draws_are_not_cut() -> None:
    tree = TokenTree.chain([1, 0], [QRow(torch.tensor([0.5, 0.5]))] * 2)
    with pytest.raises(ValueError, match="never dropped"):
        tree.first(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_q_rows_say_what_was_drawn_from(dtype: torch.dtype) -> None:
    """Drawing normalises; so must the row, or rows rounded to bf16 bias the output."""
    probs = torch.tensor([0.3, 0.25, 0.45]).to(dtype)
    exact = probs.double() / probs.double().sum()
    full, compact = QRow(probs), QRow(probs, torch.tensor([4, 0, 2]))
    assert full.dense(3).double().tolist() == pytest.approx(exact.tolist(), abs=1e-7)
    assert compact.dense(5).double().tolist() == pytest.approx(
        [float(exact[1]), 0, float(exact[2]), 0, float(exact[0])], abs=1e-7
    )
    for token in range(3):
        assert full.prob(token) == pytest.approx(float(full.dense(3)[token]))
    assert [compact.prob(token) for token in range(5)] == pytest.approx(compact.dense(5).tolist())
    assert full.dense(3).dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@given(draws(), st.data())
def test_the_likeliest_nodes_are_a_tree_and_of_equals_the_first_come_first(drawn: Drawn, data: st.DataObject) -> None:
    tree, _ = grown(drawn)
    tree.path_acceptance_probs = [data.draw(st.sampled_from((0.2, 0.5, 0.8))) for _ in range(len(tree))]
    order, probs = tree.likeliest_first()
    bounded = [min(tree.path_acceptance_probs[above] for above in tree.path(node)) for node in range(len(tree))]
    assert order == sorted(range(len(tree)), key=lambda node: (-bounded[node], node))
    assert probs == [bounded[node] for node in order]
    count = data.draw(st.integers(0, len(tree)))
    kept = tree.only(order[:count])
    assert [kept.path_tokens(node) for node in range(len(kept))] == [tree.path_tokens(node) for node in order[:count]]
    assert kept.depths == [tree.depths[node] for node in order[:count]]
    assert kept.path_acceptance_probs == [tree.path_acceptance_probs[node] for node in order[:count]]
    assert [draw.node for draw in kept.draws] == list(range(count))
    for node in range(count):
        assert kept.child(kept.parents[node], kept.tokens[node]) == node
