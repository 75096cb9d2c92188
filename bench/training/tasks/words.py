"""Words, lists of them, and JSON."""

from random import Random
from typing import Any

from bench.training.tasks import facts, vocabulary
from bench.training.tasks.base import Sample, a_or_an, ask, dumps, letters, same_json, sentence, task
from bench.training.tasks.numbers import in_words


def some_words(rng: Random, low: int, high: int) -> list[str]:
    return rng.sample(vocabulary.WORDS, rng.randint(low, high))


@task(2)
def copy(rng: Random) -> Sample:
    kind = rng.randrange(4)
    if kind == 0:
        text = letters(rng, 3, 8)
    elif kind == 1:
        text = " ".join(str(rng.randint(0, 9999)) for _ in range(rng.randint(1, 5)))
    else:
        text = " ".join(some_words(rng, 1, 8))
        text = sentence(text) + "." if kind == 3 else text
    question = rng.choice(
        ("Repeat: {}", "Repeat after me: {}", "Copy this: {}", "Say: {}", "Echo: {}", 'Write exactly "{}"')
    )
    return ask(rng, question.format(text), text, f"copy {text}")


def _word_or_letters(rng: Random) -> tuple[str, str]:
    """A word, or letters that are none, and how it is written in a question: half of the time in quotes."""
    word = rng.choice(vocabulary.WORDS) if rng.random() < 0.6 else letters(rng, 2, 6)
    return word, rng.choice((word, f'"{word}"'))


@task(6)
def reverse_word(rng: Random) -> Sample:
    word, written = _word_or_letters(rng)
    question = rng.choice(
        ("Reverse the word {}.", "Reverse {}.", "Spell {} backwards.", "Write {} backwards.", "What is {} backwards?")
    )
    return ask(rng, question.format(written), word[::-1])


@task(2)
def spell(rng: Random) -> Sample:
    word, written = _word_or_letters(rng)
    question = rng.choice(("Spell the word {}.", "Spell {}.", "How do you spell {}?", "Spell out the word {}."))
    return ask(rng, question.format(written), "-".join(word))


@task(1)
def upper_or_lower(rng: Random) -> Sample:
    word = rng.choice(vocabulary.WORDS)
    if rng.random() < 0.5:
        question = rng.choice(("Write {} in capital letters.", "Write {} in upper case.", "Convert {} to upper case."))
        return ask(rng, question.format(word), word.upper())
    question = rng.choice(("Write {} in small letters.", "Write {} in lower case.", "Convert {} to lower case."))
    return ask(rng, question.format(word.upper()), word)


@task(1.5)
def count_letters(rng: Random) -> Sample:
    word = rng.choice(vocabulary.WORDS)
    question = rng.choice(
        (
            "How many letters are in the word {}?",
            "How many letters does {} have?",
            "Count the letters of {}.",
            "How long is {}?",
        )
    )
    return ask(rng, question.format(word), f"The word {word} has {len(word)} letters.")


@task(2)
def count_items(rng: Random) -> Sample:
    if rng.random() < 0.5:
        items = some_words(rng, 1, 9)
        question = rng.choice(
            ("How many words are here: {}", "Count the words: {}", "How many items are in this list: {}")
        )
        return ask(
            rng, question.format(", ".join(items)), f"There are {len(items)}." if len(items) > 1 else "There is 1."
        )
    kinds = rng.sample(vocabulary.ITEMS, 3)
    items = rng.choices(kinds, k=rng.randint(3, 8))
    count = items.count(kinds[0])
    question = rng.choice(
        ("How many times is {} in this list: {}", "How often does {} appear: {}", "Count {} in this list: {}")
    )
    return ask(
        rng, question.format(kinds[0], ", ".join(items)), f"The list has {kinds[0]} {count} time{'s' * (count != 1)}."
    )


@task(1.5)
def sort_words(rng: Random) -> Sample:
    items = some_words(rng, 3, 5)
    question = rng.choice(
        (
            "Sort these words: {}",
            "Sort alphabetically: {}",
            "Put these words in alphabetical order: {}",
            "Sort the words {}",
        )
    )
    return ask(rng, question.format(", ".join(items)), ", ".join(sorted(items)))


@task(1.5)
def pick_item(rng: Random) -> Sample:
    items = some_words(rng, 3, 7)
    place = rng.randrange(min(len(items), 5))
    which = facts.ORDINALS[place]
    if rng.random() < 0.25:
        place, which = len(items) - 1, "last"
    question = rng.choice(
        ("What is the {} word of: {}", "What is the {} item in this list: {}", "Give me the {} word: {}")
    )
    return ask(rng, question.format(which, ", ".join(items)), f"The {which} one is {items[place]}.")


@task(1)
def reverse_list(rng: Random) -> Sample:
    items = some_words(rng, 3, 6)
    question = rng.choice(("Reverse this list: {}", "Reverse the order: {}", "Write this list backwards: {}"))
    return ask(rng, question.format(", ".join(items)), ", ".join(reversed(items)))


@task(0.7)
def name_some(rng: Random) -> Sample:
    things, pool = rng.choice(
        (
            ("animals", vocabulary.ANIMALS),
            ("colours", vocabulary.COLOUR_NAMES),
            ("fruits", vocabulary.ITEMS[:10]),
            ("jobs", vocabulary.JOBS),
            ("names", vocabulary.NAMES),
            ("capitals", vocabulary.TOWNS),
        )
    )
    count = rng.randint(2, 8)
    question = rng.choice(
        ("Name {} {}.", "List {} {}.", "Tell me {} {}.", "Give me {} {}.", "Can you name {} {}?", "Write {} {}.")
    )
    number = rng.choice((str(count), in_words(count)))
    return ask(rng, question.format(number, things), ", ".join(pool[:count]))


@task(3)
def extract_json(rng: Random) -> Sample:
    name, age = rng.choice(vocabulary.NAMES), rng.randint(1, 99)
    city, job = rng.choice(vocabulary.TOWNS), rng.choice(vocabulary.JOBS)
    text = rng.choice(
        (
            "{name} is {age} years old and works as a {job} in {city}.",
            "{name}, {age}, is a {job} from {city}.",
            "My name is {name}. I am a {job}, I am {age} and I live in {city}.",
            "The {job} {name} lives in {city} and is {age} years old.",
            "In {city} lives {name}, a {job} of {age} years.",
        )
    ).format(name=name, age=age, city=city, job=job)
    record = {"name": name, "age": age, "city": city, "job": job}
    fields = rng.sample(list(record), rng.randint(1, 4)) if rng.random() < 0.7 else ["name", "age"]
    wanted = fields[0] if len(fields) == 1 else ", ".join(fields[:-1]) + " and " + fields[-1]
    question = rng.choice(
        ("Extract {} as JSON: {}", "Write {} as JSON: {}", "Return JSON with {}: {}", "Give me {} as JSON. {}")
    )
    text, answer = a_or_an(text), dumps({field: record[field] for field in fields})
    return ask(rng, question.format(wanted, text), answer, f"json {name} {age} {city}", same_json)


@task(1)
def product_json(rng: Random) -> Sample:
    item, colour, price = rng.choice(vocabulary.ITEMS), rng.choice(vocabulary.COLOUR_NAMES), rng.randint(1, 99)
    text = rng.choice(
        (
            "The {colour} {item} costs {price} dollars.",
            "A {colour} {item} for {price} dollars.",
            "I paid {price} dollars for a {colour} {item}.",
            "For {price} dollars you get a {colour} {item}.",
        )
    ).format(item=item, colour=colour, price=price)
    question = rng.choice(("Extract item, color and price as JSON: {}", "Write item, color and price as JSON: {}"))
    answer = dumps({"item": item, "color": colour, "price": price})
    return ask(rng, question.format(a_or_an(text)), answer, f"product {item} {colour} {price}", same_json)


@task(1)
def list_json(rng: Random) -> Sample:
    items: list[Any] = some_words(rng, 2, 6) if rng.random() < 0.6 else rng.sample(range(100), rng.randint(2, 6))
    question = rng.choice(("Write as a JSON list: {}", "Convert to a JSON array: {}", "Make a JSON list of: {}"))
    return ask(rng, question.format(", ".join(map(str, items))), dumps(items), check=same_json)
