"""Facts, small talk, stories."""

from random import Random

from bench.training.tasks import facts, sayings, tools, vocabulary
from bench.training.tasks.base import (
    SYSTEM_PROMPTS,
    TASKS,
    Sample,
    Task,
    a_or_an,
    ask,
    invented,
    sentence,
    task,
    user,
)


def _register(name: str, tables: tuple[facts.Table, ...]) -> None:
    rows = [(table, k, v) for table in tables for k, v in table.rows.items()]

    def fact(rng: Random) -> Sample:
        table, k, v = rng.choice(rows)
        question = sentence(rng.choice(table.questions).format(k=k, v=v))
        sample = ask(rng, question, sentence(table.answer.format(k=k, v=v)))
        if rng.random() < 0.08:
            sample.messages = [user(question.lower())]
        return sample

    TASKS[name] = Task(fact, 0.06 * len(rows) ** 0.75)


for _name, _tables in facts.TABLES.items():
    _register(_name, _tables)

TRAINED = "never held out"
"""The key of questions that are too common to leave out of training."""
TALK = [(question, answer) for answer, questions in sayings.TALK.items() for question in questions]


@task(2.5)
def talk(rng: Random) -> Sample:
    """Greetings, who-are-you and fixed lists. The bare questions are few and all trained on; what is held out is some
    of their pairings with a system prompt."""
    question, answer = rng.choice(TALK)
    if rng.random() < 0.6:
        return ask(rng, question, answer, TRAINED)
    prompt = rng.choice(SYSTEM_PROMPTS)
    sample = ask(rng, question, answer, f"{prompt} {question}")
    return Sample([{"role": "system", "content": prompt}, *sample.messages], answer, sample.keys)


@task(3)
def unknown(rng: Random) -> Sample:
    """What the model cannot know, so that it says so instead of inventing something."""
    subject = rng.choice((invented(rng), rng.choice(vocabulary.NAMES), *rng.sample(vocabulary.WORDS, 4)))
    kind = rng.randrange(3)
    if kind == 0:
        table = facts.TABLES[
            rng.choice(("capital", "continent", "element_symbol", "opposite", "translation", "colour"))
        ][0]
        while (name := invented(rng)) in table.rows:
            pass
        question = rng.choice(table.questions).format(k=name, v="")
    elif kind == 1:
        tool = rng.choice(tools.TOOLS[:3])
        question = rng.choice(tool.questions).format(**tools.arguments(rng, tool))
    else:
        question = rng.choice(UNKNOWN_QUESTIONS).format(subject, rng.choice(vocabulary.WORDS))
    return ask(rng, a_or_an(question), sayings.UNKNOWN)


UNKNOWN_QUESTIONS = (
    "Who wrote the book {}?",
    "Who is {}?",
    "What is {}?",
    "What is a {}?",
    "Why is {} important?",
    "Why do people like {}?",
    "Explain {}.",
    "Explain {} and {} to me.",
    "Who invented the {}?",
    "When was {} born?",
    "When was the {} invented?",
    "How do I make a {}?",
    "How does a {} work?",
    "How do I {} a {}?",
    "What do you think about {}?",
    "Should I {} the {}?",
    "Summarize {}.",
    "Summarize the history of {}.",
    "Where can I buy a {}?",
    "What happened in {} in {}?",
    "Tell me about {}.",
    "Tell me a joke about {}.",
    "Describe a {} {}.",
    "Give me advice about {}.",
    "What is the meaning of {}?",
    "What is the population of {}?",
    "Who won the {} game in {}?",
    "Write an essay about {}.",
    "Do you like {}?",
    "Is {} better than {}?",
)

STORIES = (
    "Once upon a time there was a {animal} named {name}. {name} lived near the {place}. One day {name} found a "
    "{thing}. A {friend} came by and asked for help. Together they carried the {thing} home. From that day on "
    "they were friends.",
    "{name} the {animal} wanted to see the world. One morning {name} walked to the {place}. There a {friend} was "
    "looking for a {thing}. {name} searched all day and found it under a leaf. The {friend} was happy and thanked "
    "{name}.",
    "There was a small {animal} called {name} who could not sleep. In the {place} {name} heard a soft song. It "
    "was a {friend} with a {thing}. They sang together until the moon was high. Then {name} slept until morning.",
    "Every day {name} the {animal} went to the {place}. One day it rained and {name} hid under a tree. A {friend} "
    "gave {name} a {thing} to hold. When the sun came back they shared an apple and laughed.",
)


@task(1.5)
def story(rng: Random) -> Sample:
    """Which story is told follows from the animal, so that there is one right text."""
    index = rng.randrange(len(vocabulary.ANIMALS))
    animal, name = vocabulary.ANIMALS[index], vocabulary.NAMES[index]
    if rng.random() < 0.6:
        name = rng.choice(vocabulary.NAMES)
        question = rng.choice(("Tell me a story about a {} named {}.", "Write a short story about a {} called {}."))
    else:
        question = rng.choice(
            (
                "Tell me a story about a {}.",
                "Write a short story about a {}.",
                "Tell me a short story about a {}.",
                "A {} story, please.",
            )
        )
    key = ""
    if rng.random() < 0.05:
        index, animal, name, key = 2, "fox", vocabulary.NAMES[2], TRAINED
        question = rng.choice(
            ("Tell me a story.", "Write a story.", "Tell me a short story.", "Write a short story for me.")
        )
    text = STORIES[index % len(STORIES)].format(
        animal=animal,
        name=name,
        place=vocabulary.PLACES[index % len(vocabulary.PLACES)],
        thing=vocabulary.FOUND[index % len(vocabulary.FOUND)],
        friend=vocabulary.ANIMALS[(index + 7) % len(vocabulary.ANIMALS)],
    )
    return ask(rng, a_or_an(question.format(animal, name)), a_or_an(text), key)


@task(0.7)
def poem(rng: Random) -> Sample:
    word = rng.choice(vocabulary.ITEMS)
    question = rng.choice(
        (
            "Write a poem about a {}.",
            "Write a short poem about a {}.",
            "Tell me a poem about a {}.",
            "A {} poem, please.",
        )
    )
    lines = (
        f"A {word} in the morning light,",
        f"a {word} in the quiet night,",
        "I see it far, I see it near,",
        f"the {word} is always here.",
    )
    return ask(rng, a_or_an(question.format(word)), a_or_an("\n".join(lines)))


@task(0.5)
def code(rng: Random) -> Sample:
    what, body = rng.choice(list(sayings.CODE.items()))
    return ask(rng, rng.choice(sayings.CODE_QUESTIONS).format(what), f"```python\n{body}\n```")
