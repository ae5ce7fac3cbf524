"""The verifier: a payment is right if it has the amount and no payment has fewer coins.

An exact payment with more coins earns a part: the policy learns from every attempt that is better than another.
"""

from m2forge.records import Submission, Task, Verdict

COINS = (500, 200, 100, 50, 20, 10, 5, 2, 1)


def fewest(amount: int) -> list[int]:
    """The payment with the fewest coins: always the largest coin that fits."""
    coins: list[int] = []
    for coin in COINS:
        coins += [coin] * (amount // coin)
        amount %= coin
    return coins


def verify(task: Task, submission: Submission) -> Verdict:
    amount = int(task.instruction.removeprefix("Pay ").removesuffix("."))
    best, words = fewest(amount), submission.answer.split()
    paid = [int(word) for word in words if word.isdecimal() and int(word) in COINS]
    is_exact = len(paid) == len(words) and sum(paid) == amount
    perf = len(best) / len(paid) if is_exact else 0.0
    return Verdict(perf, {"paid": submission.answer[:100], "fewest": best}, criteria={"exact": float(is_exact)})
