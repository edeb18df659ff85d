"""Page accounting: who holds what, what is shared, what is evicted first."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_serve.engine.embedded.kv_cache import PageAllocator, extend_page_keys


def keys_of(tokens, page_size=4):
    keys = []
    extend_page_keys(keys, tokens, page_size)
    return keys


def filled(pages, tokens):
    """Pages that hold `tokens`, published and freed again."""
    held = pages.allocate(pages.pages_for(len(tokens)))
    for page, key in zip(held, keys_of(tokens), strict=False):
        pages.publish(page, key)
    pages.free(held)
    return held


def test_a_page_is_handed_out_once():
    pages = PageAllocator(5, 4)
    held = pages.allocate(5)
    assert sorted(held) == [0, 1, 2, 3, 4]
    assert pages.num_free == 0
    with pytest.raises(AssertionError, match="1 pages asked for, 0 free"):
        pages.allocate(1)
    pages.free(held)
    assert pages.num_free == 5
    pages.check()


def test_double_free_is_a_fault():
    pages = PageAllocator(2, 4)
    held = pages.allocate(1)
    pages.free(held)
    with pytest.raises(AssertionError, match="freed twice"):
        pages.free(held)


def test_a_key_names_everything_to_its_left():
    a, b = keys_of([1, 2, 3, 4, 5, 6, 7, 8, 9]), keys_of([0, 2, 3, 4, 5, 6, 7, 8, 9])
    assert len(a) == 2  # the ninth token fills no page
    assert a[0] != b[0]
    assert a[1] != b[1]
    assert keys_of([1, 2, 3, 4, 5]) == a[:1]


def test_keys_extend_without_starting_again():
    tokens = list(range(40))
    keys = keys_of(tokens[:17])
    extend_page_keys(keys, tokens, 4)
    assert keys == keys_of(tokens)


def test_a_freed_prefix_is_shared_until_it_is_evicted():
    pages = PageAllocator(4, 4)
    first = filled(pages, [1, 2, 3, 4, 5, 6, 7, 8])
    granted, shared = pages.admit(keys_of([1, 2, 3, 4, 5, 6, 7, 8, 9]), 3, spare=0)
    assert shared == 2
    assert granted[:2] == first
    again, shared = pages.admit(keys_of([1, 2, 3, 4]), 1, spare=0)  # held pages are shared as well
    assert (again, shared) == (first[:1], 1)
    pages.free(granted)
    pages.free(again)
    pages.allocate(4)  # everything goes to other content
    pages.check()
    assert pages.admit(keys_of([1, 2, 3, 4]), 1, spare=0) is None


def test_a_prefix_is_evicted_from_its_end():
    pages = PageAllocator(3, 4)
    first = filled(pages, list(range(12)))
    pages.allocate(1)
    granted, shared = pages.admit(keys_of(list(range(12))), 2, spare=0)
    assert shared == 2
    assert granted == first[:2]


def test_admission_leaves_pages_to_spare_and_changes_nothing_when_it_refuses():
    pages = PageAllocator(4, 4)
    filled(pages, [1, 2, 3, 4])
    assert pages.admit(keys_of([1, 2, 3, 4, 5, 6, 7, 8]), 3, spare=2) is None
    pages.check()
    assert pages.num_free == 4
    granted, shared = pages.admit(keys_of([1, 2, 3, 4, 5, 6, 7, 8]), 3, spare=1)
    assert (len(granted), shared, pages.num_free) == (3, 1, 1)


def test_without_prefix_cache_nothing_is_shared():
    pages = PageAllocator(4, 4, prefix_cache=False)
    filled(pages, [1, 2, 3, 4])
    assert pages.admit(keys_of([1, 2, 3, 4]), 1, spare=0)[1] == 0


def test_suspect_pages_are_zeroed_once_nobody_holds_them_and_never_shared_again():
    pages = PageAllocator(4, 4)
    held = filled(pages, [1, 2, 3, 4])
    (first,), _ = pages.admit(keys_of([1, 2, 3, 4]), 1, spare=0)
    (second,), _ = pages.admit(keys_of([1, 2, 3, 4]), 1, spare=0)
    assert first == second == held[0]
    assert pages.free([first], suspect=True) == []
    assert pages.admit(keys_of([1, 2, 3, 4]), 1, spare=0)[1] == 0
    pages.publish(second, keys_of([1, 2, 3, 4])[0])  # its other holder does not bring it back
    pages.check()
    assert pages.free([second]) == [second]
    pages.check()


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12), st.booleans(), st.booleans()), max_size=60))
def test_every_page_is_always_in_one_place(ops):
    """Sequences of a tiny alphabet come and go in any order; in the end all pages are free."""
    pages = PageAllocator(9, 2)
    held = []
    for symbol, length, end, suspect in ops:
        tokens = [symbol] * length
        granted = pages.admit(keys_of(tokens, 2), pages.pages_for(length), spare=0)
        if granted:
            for page, key in zip(granted[0], keys_of(tokens, 2), strict=False):
                pages.publish(page, key)
            held.append(granted[0])
        if end and held:
            pages.free(held.pop(0), suspect=suspect)
        pages.check()
    for each in held:
        pages.free(each)
    pages.check()
    assert pages.num_free == 9


def test_memory_that_nothing_has_needed_is_not_touched() -> None:
    """One request after another lives on the pages of the first: the rest of a large pool costs no memory."""
    pages = PageAllocator(1000, 4)
    used = set()
    for _ in range(500):
        held = pages.allocate(3)
        used.update(held)
        pages.free(held)
    assert len(used) == 3
