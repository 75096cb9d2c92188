"""Arithmetic and numbers."""

from random import Random

from bench.training.tasks import vocabulary
from bench.training.tasks.base import Sample, ask, last_number, task, words

SUMS = (
    "What is {} + {}?",
    "What's {} + {}?",
    "{} + {}",
    "{} + {} =",
    "{} + {} = ?",
    "What is {} plus {}?",
    "How much is {} + {}?",
    "How much is {} plus {}?",
    "Calculate {} + {}.",
    "Compute {} + {}.",
    "Add {} and {}.",
    "What is the sum of {} and {}?",
    "Can you add {} and {}?",
    "Please calculate {} + {}.",
)
DIFFERENCES = (
    "What is {} - {}?",
    "What's {} - {}?",
    "{} - {}",
    "{} - {} =",
    "{} - {} = ?",
    "What is {} minus {}?",
    "How much is {} - {}?",
    "How much is {} minus {}?",
    "Calculate {} - {}.",
    "Compute {} - {}.",
    "Take {1} from {0}.",
    "Subtract {1} from {0}.",
    "What is the difference of {} and {}?",
    "Please calculate {} - {}.",
)
PRODUCTS = (
    "What is {} * {}?",
    "What is {} x {}?",
    "{} * {}",
    "{} * {} =",
    "What is {} times {}?",
    "How much is {} times {}?",
    "How much is {} * {}?",
    "Calculate {} * {}.",
    "Compute {} x {}.",
    "Multiply {} by {}.",
    "What is the product of {} and {}?",
)
QUOTIENTS = (
    "What is {} / {}?",
    "{} / {}",
    "What is {} divided by {}?",
    "How much is {} divided by {}?",
    "Calculate {} / {}.",
    "Divide {} by {}.",
)


def _sum(rng: Random, a: int, b: int) -> Sample:
    key = f"sum {min(a, b)} {max(a, b)}"
    return ask(rng, rng.choice(SUMS).format(a, b), f"{a} + {b} = {a + b}.", key, last_number)


@task(6)
def add(rng: Random) -> Sample:
    return _sum(rng, rng.randint(0, 99), rng.randint(0, 99))


@task(3)
def add_large(rng: Random) -> Sample:
    return _sum(rng, rng.randint(100, 999), rng.randint(1, 999))


@task(6)
def subtract(rng: Random) -> Sample:
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    if rng.random() < 0.5:
        a, b = max(a, b), min(a, b)
    return ask(rng, rng.choice(DIFFERENCES).format(a, b), f"{a} - {b} = {a - b}.", f"difference {a} {b}", last_number)


@task(2.5)
def multiply(rng: Random) -> Sample:
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    return ask(rng, rng.choice(PRODUCTS).format(a, b), f"{a} * {b} = {a * b}.", check=last_number)


@task(1.5)
def divide(rng: Random) -> Sample:
    a, b = rng.randint(0, 12), rng.randint(1, 12)
    return ask(rng, rng.choice(QUOTIENTS).format(a * b, b), f"{a * b} / {b} = {a}.", check=last_number)


@task(2)
def word_problem(rng: Random) -> Sample:
    a, b = sorted((rng.randint(1, 50), rng.randint(1, 50)), reverse=True)
    name, thing = (
        rng.choice(vocabulary.NAMES),
        rng.choice(("apples", "books", "coins", "cards", "pens", "stones", "eggs")),
    )
    more = rng.random() < 0.5
    act = rng.choice(
        ("buys {} more", "finds {} more", "gets {} more") if more else ("gives away {}", "loses {}", "sells {}")
    )
    sign, result = ("+", a + b) if more else ("-", a - b)
    question = f"{name} has {a} {thing} and {act.format(b)}. How many {thing} does {name} have now?"
    return ask(
        rng, question, f"{a} {sign} {b} = {result}. {name} has {result} {thing}.", f"story {a} {sign} {b}", last_number
    )


@task(1)
def double_or_half(rng: Random) -> Sample:
    n = rng.randint(0, 99)
    if rng.random() < 0.5:
        question = rng.choice(("What is the double of {}?", "Double {}.", "What is twice {}?", "What is two times {}?"))
        return ask(rng, question.format(n), f"The double of {n} is {2 * n}.", check=last_number)
    question = rng.choice(("What is half of {}?", "Halve {}.", "What is one half of {}?", "How much is half of {}?"))
    return ask(rng, question.format(2 * n), f"Half of {2 * n} is {n}.", check=last_number)


ONES = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
TENS = words("twenty thirty forty fifty sixty seventy eighty ninety")


def in_words(n: int) -> str:
    if n < 20:
        return ONES[n]
    return TENS[n // 10 - 2] + (f"-{ONES[n % 10]}" if n % 10 else "")


def roman(n: int) -> str:
    text = ""
    for value, digits in ((50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")):
        text += digits * (n // value)
        n %= value
    return text


@task(1.5)
def number_words(rng: Random) -> Sample:
    n = rng.randint(0, 99)
    if rng.random() < 0.5:
        question = rng.choice(
            ("Write {} in words.", "Write the number {} as a word.", "Write out the number {}.", "{} in words?")
        )
        return ask(rng, question.format(n), in_words(n))
    question = rng.choice(("Write {} as a number.", "Write {} in digits.", "Which number is {}?", "{} in digits?"))
    return ask(rng, question.format(in_words(n)), str(n), check=last_number)


@task(1)
def roman_numerals(rng: Random) -> Sample:
    n = rng.randint(1, 50)
    if rng.random() < 0.5:
        question = rng.choice(
            ("Write {} as a Roman numeral.", "What is {} in Roman numerals?", "Roman numeral for {}?")
        )
        return ask(rng, question.format(n), roman(n))
    question = rng.choice(
        ("Which number is the Roman numeral {}?", "What number is {}?", "Convert the Roman numeral {}.")
    )
    return ask(rng, question.format(roman(n)), str(n), check=last_number)


@task(1.5)
def compare(rng: Random) -> Sample:
    a, b = rng.sample(range(100), 2)
    larger, smaller, key = max(a, b), min(a, b), f"compare {a} {b}"
    kind = rng.randrange(4)
    if kind == 0:
        question = rng.choice(
            ("Which is larger, {} or {}?", "Which number is bigger, {} or {}?", "What is more, {} or {}?")
        )
        return ask(rng, question.format(a, b), f"{larger} is larger than {smaller}.", key)
    if kind == 1:
        question = rng.choice(
            ("Which is smaller, {} or {}?", "Which number is smaller, {} or {}?", "What is less, {} or {}?")
        )
        return ask(rng, question.format(a, b), f"{smaller} is smaller than {larger}.", key)
    if kind == 2:
        question = rng.choice(("Is {} larger than {}?", "Is {} greater than {}?", "Is {} more than {}?", "Is {} > {}?"))
        return ask(
            rng,
            question.format(a, b),
            f"Yes, {a} is larger than {b}." if a > b else f"No, {a} is smaller than {b}.",
            key,
        )
    question = rng.choice(("Is {} smaller than {}?", "Is {} less than {}?", "Is {} < {}?"))
    return ask(
        rng, question.format(a, b), f"Yes, {a} is smaller than {b}." if a < b else f"No, {a} is larger than {b}.", key
    )


@task(1)
def parity(rng: Random) -> Sample:
    n = rng.randint(0, 999)
    kind = "odd" if n % 2 else "even"
    question = rng.choice(("Is {} even or odd?", "Is {} odd or even?", "Is the number {} even or odd?"))
    return ask(rng, question.format(n), f"{n} is {kind}.", f"parity {n}")


@task(1)
def extremes(rng: Random) -> Sample:
    numbers = rng.sample(range(100), rng.randint(3, 6))
    which, value = rng.choice((("largest", max(numbers)), ("smallest", min(numbers))))
    question = rng.choice(
        ("What is the {} of these numbers: {}?", "Which number is the {}: {}?", "Find the {} number: {}")
    )
    return ask(
        rng, question.format(which, ", ".join(map(str, numbers))), f"The {which} number is {value}.", check=last_number
    )


@task(2)
def sort_numbers(rng: Random) -> Sample:
    numbers = rng.sample(range(100), rng.randint(3, 6))
    if rng.random() < 0.7:
        question = rng.choice(
            ("Sort these numbers: {}", "Sort: {}", "Put these numbers in order: {}", "Sort the numbers {}")
        )
        ordered = sorted(numbers)
    else:
        question = rng.choice(("Sort these numbers in descending order: {}", "Sort from largest to smallest: {}"))
        ordered = sorted(numbers, reverse=True)
    return ask(rng, question.format(", ".join(map(str, numbers))), ", ".join(map(str, ordered)))


@task(0.6)
def count_range(rng: Random) -> Sample:
    """The one task with long answers, for whoever wants to watch a stream."""
    low, length = rng.randint(0, 60), rng.choice((rng.randint(3, 12), rng.randint(3, 60)))
    numbers = list(range(low, min(low + length, 100) + 1))
    if rng.random() < 0.25:
        numbers.reverse()
        question = rng.choice(("Count down from {} to {}.", "Count backwards from {} to {}."))
    else:
        question = rng.choice(("Count from {} to {}.", "Count from {} up to {}.", "List the numbers from {} to {}."))
    return ask(rng, question.format(numbers[0], numbers[-1]), ", ".join(map(str, numbers)))
