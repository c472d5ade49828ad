"""The prompts of workload `offline`, written for it: six categories, four prompts each."""

from __future__ import annotations

PROMPTS: dict[str, tuple[str, ...]] = {
    "question": (
        "Why do ships made of steel float although a steel nail sinks?",
        "What should I look at before I rent a flat in an old house?",
        "How does a refrigerator make things cold? Explain it to somebody without a technical "
        "background.",
        "My tomato plants have yellow leaves at the bottom. What are the likely causes, and what "
        "can I do about each of them?",
    ),
    "code": (
        "Write a Python function that merges two sorted lists into one sorted list without using "
        "sort. Add a docstring and three assertions that test it.",
        "Write a Python class for a bank account with deposit, withdraw and a list of past "
        "movements. Withdrawing more than the balance raises an error.",
        "This function should return the largest even number of a list but does not. Find the "
        "mistake and correct it:\n\ndef largest_even(numbers):\n    best = 0\n    for number in "
        "numbers:\n        if number % 2 == 0 and number < best:\n            best = number\n"
        "    return best\n",
        "Write an SQL query that lists the five customers with the highest total of orders in "
        "2023. Tables: customers(id, name), orders(id, customer_id, amount, ordered_on).",
    ),
    "summary": (
        "Summarise this in two sentences: The town of Brennau lost its only bridge in the flood "
        "of 1953. For two years a ferry carried people, carts and animals across the river, and "
        "on market days the queue reached the church. The council first wanted a wooden bridge "
        "again, since wood was cheap, but the smith Johanna Reuter showed in a model that the "
        "spring ice would break it within ten years. The stone bridge that was opened in 1955 "
        "still stands, and each year on its birthday the market is held on it.",
        "Write a short message to all staff from these notes: lift out of order from Monday; "
        "repair takes three days; deliveries through the side door; people who cannot use the "
        "stairs should call the front desk, extension 12; apologies.",
        "Give the three main points of this text as a list: Bees do not see red, but they see "
        "ultraviolet light, which we do not. Many flowers that look plain to us carry lines in "
        "ultraviolet that lead to their nectar. Gardeners who want to feed bees should therefore "
        "not choose flowers by the colours that people like. It matters more that something "
        "blooms in every month, because a colony starves in a gap of three weeks even if spring "
        "and autumn are rich.",
        "Write one headline and one sentence of introduction for a report about this: a school "
        "replaced its car park by a garden, pupils grow vegetables there, the kitchen uses them, "
        "and the number of children who come by bicycle has doubled.",
    ),
    "maths": (
        "A train leaves at 9:40 and travels 210 kilometres at 84 kilometres per hour. When does "
        "it arrive? Explain step by step.",
        "A jacket costs 80 euros. Its price rises by 25 percent and then falls by 20 percent. "
        "What does it cost in the end, and why is that so?",
        "A tank holds 600 litres. One pipe fills it in 6 hours, another empties it in 10 hours. "
        "How long does it take to fill the empty tank with both open?",
        "Solve for x and show every step: 3(x - 4) + 5 = 2x + 7.",
    ),
    "translation": (
        "Translate into German, French and Spanish: The meeting has been moved to Thursday at "
        "three o'clock. Please bring the signed forms with you.",
        "Translate into English: Der Zug hatte wegen eines umgestürzten Baumes vierzig Minuten "
        "Verspätung, deshalb haben wir den Anschluss verpasst.",
        "Rewrite this in plain language: The lessee shall indemnify the lessor against all claims "
        "arising from the improper use of the premises during the term of the lease.",
        "Rewrite this so that it sounds friendly: Your invoice is late again. Pay within a week "
        "or we stop all work.",
    ),
    "list": (
        "List twelve animals that live in forests, in alphabetical order, each with one sentence "
        "about what it eats.",
        "Write a packing list for a week of hiking from hut to hut, grouped by clothing, food, "
        "tools and papers.",
        "Write these entries as JSON with the keys name, year and city: Anna Holm, 1991, Oslo; "
        "Peter Marsh, 1984, Leeds; Lucia Conti, 2001, Bari; Tomas Novak, 1979, Brno.",
        "Give ten ideas for a birthday party of eight-year-old children on a rainy day, and for "
        "each the things one has to buy.",
    ),
}
