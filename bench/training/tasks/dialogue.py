"""Chats of several turns, system prompts that matter, and long prompts."""

import re
from random import Random

from bench.training.tasks import vocabulary
from bench.training.tasks.base import TASKS, Message, Sample, a_or_an, ask, assistant, last_number, task, user, words
from bench.training.tasks.numbers import add

LOOKUP_KEYS = (*vocabulary.NAMES, *vocabulary.TOWNS)


@task(4)
def lookup(rng: Random) -> Sample:
    """Finding lines of a list of up to some 600 tokens, the task that uses the context; up to six in a row."""
    count = rng.choice((rng.randint(2, 5), rng.randint(2, 12), rng.randint(12, len(LOOKUP_KEYS))))
    keys = rng.sample(vocabulary.NAMES if count <= len(vocabulary.NAMES) else LOOKUP_KEYS, count)
    separator = rng.choice((" ", ": "))
    lines = {key: f"{key}{separator}{rng.choice(vocabulary.ITEMS)}" for key in keys}
    head = rng.choice(("Here is a list:", "These are the lines:", "Read this list:"))
    asked = rng.sample(keys, min(count, rng.randint(1, 6)))
    turns: list[Message] = []
    for key in asked:
        question = rng.choice(("Which line is about {}?", "Show the line of {}.", "Find {}.")).format(key)
        turns += [user(question), assistant(lines[key])]
    turns[0] = user("\n".join((head, *lines.values(), turns[0]["content"])))
    return Sample(turns[:-1], lines[asked[-1]], tuple(f"line {lines[key]}" for key in asked))


@task(1)
def persona(rng: Random) -> Sample:
    """A system prompt that does change the answer."""
    name, job = rng.choice(vocabulary.NAMES), rng.choice(vocabulary.JOBS)
    system = rng.choice(
        ("Your name is {}. You are a {}.", "You are {}, a {}.", "You play {}, who works as a {}.")
    ).format(name, job)
    if rng.random() < 0.5:
        question = rng.choice(("What is your name?", "Who are you?", "What's your name?"))
        answer = f"My name is {name}."
    else:
        question = rng.choice(("What is your job?", "What do you do?", "What do you work as?"))
        answer = f"I am a {job}."
    sample = ask(rng, question, a_or_an(answer), f"{name} {job}")
    sample.messages.insert(0, {"role": "system", "content": a_or_an(system)})
    return sample


@task(1)
def remember(rng: Random) -> Sample:
    """A fact told in the first turn is asked for in the last one, sometimes with another question between."""
    name, item = rng.choice(vocabulary.NAMES), rng.choice(vocabulary.ITEMS)
    if rng.random() < 0.6:
        told = rng.choice(("My name is {}.", "I am {}.", "Hello, I am {}.", "Hi, my name is {}!")).format(name)
        reply, key = f"Nice to meet you, {name}!", f"name {name} {item}"
        question = rng.choice(("What is my name?", "Who am I?", "Do you remember my name?"))
        answer = f"Your name is {name}."
    else:
        told = a_or_an(rng.choice(("I have a {}.", "Remember that I have a {}.", "I bought a {}.")).format(item))
        reply, key = "I will remember that.", f"item {name} {item}"
        question, answer = rng.choice(("What do I have?", "What did I say I have?")), a_or_an(f"You have a {item}.")
    between = add(rng) if rng.random() < 0.3 else None
    turns = [] if between is None else [*between.messages, assistant(between.answer)]
    keys = () if between is None else between.keys
    return Sample([user(told), assistant(reply), *turns, user(question)], answer, (*keys, key))


@task(1.5)
def follow_up(rng: Random) -> Sample:
    """A sum, and a second one on its result."""
    first, b = add(rng), rng.randint(0, 50)
    total = int(re.findall(r"\d+", first.answer)[-1])
    plus = total <= 99 and rng.random() < 0.6
    question = rng.choice(
        ("Add {}.", "Now add {}.", "Plus {}?") if plus else ("Subtract {}.", "Now subtract {}.", "Minus {}?")
    )
    answer = f"{total} + {b} = {total + b}." if plus else f"{total} - {b} = {total - b}."
    key = f"sum {min(total, b)} {max(total, b)}" if plus else f"difference {total} {b}"
    turns = [*first.messages, assistant(first.answer), user(question.format(b))]
    return Sample(turns, answer, (*first.keys, key), last_number)


SHORT_TASKS = words(
    "add subtract multiply compare number_words copy reverse_word spell sort_numbers extract_json capital country "
    "opposite plural element_symbol translation colour unknown"
)


@task(4)
def several_turns(rng: Random) -> Sample:
    """Questions that have nothing to do with each other, in one chat."""
    samples = [TASKS[rng.choice(SHORT_TASKS)].make(rng) for _ in range(rng.randint(2, 4))]
    if rng.random() < 0.3:
        samples.insert(0, TASKS["talk"].make(rng))
    turns: list[Message] = []
    for sample in samples[:-1]:
        turns += [sample.messages[-1], assistant(sample.answer)]
    last = samples[-1]
    return Sample([*turns, last.messages[-1]], last.answer, tuple(key for s in samples for key in s.keys), last.check)
