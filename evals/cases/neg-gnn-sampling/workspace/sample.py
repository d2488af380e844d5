"""Neighbour sampling."""

import random


def sample(neighbours, k, seed):
    rng = random.Random(seed)
    return [rng.choice(neighbours) for _ in range(k)]


if __name__ == "__main__":
    for seed in range(50):
        drawn = sample(list(range(10)), 5, seed)
        assert len(set(drawn)) == 5, drawn
        assert sorted(sample([1, 2], 5, seed)) == [1, 2]
    print("ok")
