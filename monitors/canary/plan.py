"""What the canary asks: a few prompts of our own, always the same, with few tokens to answer.

Each has a continuation of which a language model is sure, so that rounding seldom turns it.  The long ones can only be
continued from what stands far back in their KV cache, and are longer than a KV block of any backend (16 tokens on GPUs,
128 on vLLM's CPU build), so that they can come from the prefix cache.
"""

MAX_TOKENS = 16
"""Most tokens of one answer."""

_STORY = (
    "The lighthouse keeper wrote the names of all ships into a green book. On Monday the schooner Amelia came in with "
    "oranges and salt. On Tuesday nothing came, because of the fog. On Wednesday the steamer Baltic brought coal, two "
    "horses and a piano for the school. On Thursday the Amelia sailed again, with wool and letters. On Friday the "
    "pilot boat found a bottle with a map inside, and the keeper put it into a drawer below the lamp. On Saturday he "
    "painted the door white, and on Sunday he slept until noon. In the week that followed, the wind turned north. The "
    "fishermen stayed at home, mended their nets, and told each other what the sea had taken from them and what it had "
    "given back. Only the keeper's daughter went out, in a boat of her own, to look for the island on the map."
)

_REGISTER = (
    "locker 11: violet umbrella\nlocker 12: copper kettle\nlocker 13: paper lantern\nlocker 14: wooden flute\n"
    "locker 15: silver thimble\nlocker 16: rubber boots\nlocker 17: glass bottle\nlocker 18: cotton blanket\n"
    "locker 19: leather saddle\nlocker 20: brass compass\nlocker 21: straw basket\nlocker 22: marble statue\n"
    "locker 23: iron hammer\nlocker 24: woollen scarf\nlocker 25: velvet curtain\nlocker 26: golden ring\n"
)

PROMPTS = (
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
    "January, February, March, April, May, June, July, August, September, October, November, December, January, "
    "February, March,",
    "France: Paris\nItaly: Rome\nSpain: Madrid\nGermany: Berlin\nAustria: Vienna\nFrance: Paris\nItaly: Rome\nSpain:",
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\ndef multiply(a, b):\n",
    f"{_STORY}\n\nThe same text once more:\n\nThe lighthouse keeper wrote the names",
    f"{_REGISTER}\nThe same list once more:\n\nlocker 11: violet umbrella\nlocker 12:",
)
"""In the order in which they are asked."""
