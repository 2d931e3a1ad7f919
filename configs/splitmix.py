"""Constants of splitmix64, which turns `run.seed` into initial values (training/init.py) and an
order of the data (data/order.py). Both hash an index with it, the one in torch and the other in
numpy, so they share its constants only.

Source: Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014; variant 13
of its output function,

    x ^= x >> SHIFTS[0];  x *= FACTORS[0];  x ^= x >> SHIFTS[1];  x *= FACTORS[1];  x ^= x >> SHIFTS[2]   (modulo 2^64)
"""

GAMMA = 0x9E3779B97F4A7C15  # the step from one index to the next: 2^64 / the golden ratio, made odd
SHIFTS = (30, 27, 31)
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
