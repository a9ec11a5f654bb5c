from learner.training.shared_copies import CopyOrder, spread


def test_weights_are_spread_evenly_and_alike_on_every_rank() -> None:
    sizes = {"embedding": 900, **{f"layer{number}": 100 + number for number in range(40)}}
    owners = spread(sizes, 4)
    assert owners == spread(dict(reversed(sizes.items())), 4)
    loads = [sum(size for name, size in sizes.items() if owners[name] == rank) for rank in range(4)]
    assert max(loads) - min(loads) <= min(sizes.values())
    assert set(spread(sizes, 1).values()) == {0}


def test_an_order_is_told_to_the_other_ranks_as_it_is() -> None:
    order = CopyOrder(part="base", bucket_bytes=8, shared=True, number=3, wanted=[1, 2])
    assert CopyOrder.from_text(order.to_text()) == order
