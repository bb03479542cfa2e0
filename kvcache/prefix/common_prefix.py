"""The common prefix of two runs of token ids."""


def common_prefix(left: tuple[int, ...], right: tuple[int, ...], start: int = 0) -> int:
    """Count the first ids of ``left`` that ``right`` has from ``start`` on.

    It compares whole slices, and finds a difference by bisection: prompts have tens of thousands of
    tokens, and a loop over them in Python would delay every step.
    """
    limit = min(len(left), len(right) - start)
    if limit <= 0 or left[0] != right[start]:
        return 0
    if left[:limit] == right[start : start + limit]:
        return limit
    agreed, differing = 1, limit
    while differing - agreed > 1:
        middle = (agreed + differing) // 2
        if left[agreed:middle] == right[start + agreed : start + middle]:
            agreed = middle
        else:
            differing = middle
    return agreed
