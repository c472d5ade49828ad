"""The demo's prompts, written for it: chat, code, maths, summarising, rewriting, extraction."""

from __future__ import annotations

PROMPTS = (
    "I have a free Saturday in a city I do not know. How should I plan the day?",
    "Write a Python function that returns the n-th Fibonacci number, and one that lists the "
    "first n of them. Add a docstring to each.",
    "A bakery sells rolls at 3 for 2 euros. Anna buys 12 rolls and pays with a 20 euro note. "
    "How much change does she get? Explain step by step.",
    "Summarise this in two sentences: The old lighthouse on the cape was built in 1871 to guide "
    "fishing boats past the reef. For ninety years a keeper lived there and lit the lamp by hand "
    "every evening. In 1961 the lamp was replaced by an electric one, the last keeper moved to the "
    "village, and the house stood empty until a group of volunteers turned it into a small museum "
    "of the sea.",
    "Rewrite this letter so that it is polite: You sent me the wrong shoes. I ordered the blue "
    "ones in size 42 and got red ones in size 40. Send me the right ones at once and take these "
    "back.",
    "List every name and every date in this text as a table with two columns: Maria opened the "
    "shop on 3 May 2004. Her brother Luis joined her on 17 June 2006, and their cousin Elena took "
    "over the accounts on 1 January 2011.",
    "Explain to a ten-year-old why the sky is blue and why it is red in the evening.",
    "Write a JavaScript function that takes a list of words and returns an object that counts how "
    "often each word occurs.",
)
