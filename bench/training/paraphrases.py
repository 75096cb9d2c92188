"""Sentences that say the same in other words: what the embedded sentence embedder learns from and is measured with.

A meaning is a topic with its slots filled (who, what, where, how many). Each topic has ways of saying it, the last two
of which are only for measuring; a slot's word has other words of the same sense, and numbers are digits or words.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from random import Random

from bench.training.tasks.base import words
from bench.training.tasks.facts import CAPITALS
from bench.training.tasks.vocabulary import ANIMALS, COLOUR_NAMES, JOBS, NAMES

HELD_OUT_WAYS = 2
_NUMBERS = words(
    "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen"
)


def _senses(text: str) -> tuple[tuple[str, ...], ...]:
    """`a=b, c=d` as ((a, b), (c, d)): the words of one sense."""
    return tuple(tuple(sense.strip().split("=")) for sense in text.split(","))


def _single(values: list[str]) -> tuple[tuple[str, ...], ...]:
    return tuple((value,) for value in values)


SLOTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "name": _single(NAMES),
    "town": _single(list(CAPITALS.values())),
    "animal": _single(ANIMALS),
    "colour": _single(COLOUR_NAMES),
    "job": _senses("doctor=physician, lawyer=attorney, writer=author, cook=chef") + _single(
        [job for job in JOBS if job not in ("doctor", "lawyer", "writer", "cook")]
    ),
    "number": tuple((str(n), word) for n, word in enumerate(_NUMBERS, 2)),
    "thing": _senses(
        "car=automobile, phone=telephone, sofa=couch, bicycle=bike, picture=image, coat=jacket, shop=store, "
        "present=gift, film=movie, cup=mug, boat=ship, stone=rock, road=street, television=TV, rubbish=garbage, lamp, "
        "book, table, key"
    ),
    "food": _senses("bread, soup, rice, sweets=candy, biscuits=cookies, cake, pasta=noodles, fish, cheese, fruit"),
    "feeling": _senses(
        "happy=glad, sad=unhappy, angry=furious, afraid=scared, tired=exhausted, ill=sick, calm=relaxed, proud, bored"
    ),
    "size": _senses(
        "big=large, small=little, expensive=costly, cheap=inexpensive, old=ancient, new=modern, quick=fast"
    ),
    "weather": _senses(
        "rainy=wet, sunny=bright, windy=stormy, cold=chilly, hot=very warm, foggy=misty, snowy=full of snow"
    ),
    "day": _single(words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")),
}  # fmt: skip
TOPICS: dict[str, tuple[str, ...]] = {
    "buy": (
        "{name} bought a {thing} in {town}.",
        "In {town}, {name} purchased a {thing}.",
        "A {thing} was bought by {name} in {town}.",
        "{name} got a {thing} at a shop in {town}.",
        "{name} paid for a {thing} in {town}.",
        "While in {town}, {name} acquired a {thing}.",
    ),
    "travel": (
        "{name} travels to {town} on {day}.",
        "On {day} {name} goes to {town}.",
        "{name}'s trip to {town} begins on {day}.",
        "{day} is when {name} leaves for {town}.",
        "{name} is going on a journey to {town} this {day}.",
        "{town} is where {name} will travel on {day}.",
    ),
    "job": (
        "{name} works as a {job} in {town}.",
        "In {town} {name} is a {job}.",
        "{name} has a job as a {job} in {town}.",
        "The {job} in {town} is called {name}.",
        "{name} earns a living in {town} as a {job}.",
        "{name}, a {job}, works in {town}.",
    ),
    "pet": (
        "{name} has a {colour} {animal}.",
        "The {animal} of {name} is {colour}.",
        "{name} owns a {colour} {animal}.",
        "A {colour} {animal} belongs to {name}.",
        "{name} keeps a {animal} that is {colour}.",
        "{name}'s pet is a {colour} {animal}.",
    ),
    "count": (
        "There are {number} {animal}s in the garden.",
        "{number} {animal}s are in the garden.",
        "I can see {number} {animal}s in the garden.",
        "The garden has {number} {animal}s in it.",
        "In the garden live {number} {animal}s.",
        "We counted {number} {animal}s outside in the garden.",
    ),
    "weather": (
        "It is {weather} in {town} on {day}.",
        "The weather in {town} is {weather} on {day}.",
        "{town} is {weather} this {day}.",
        "On {day} people in {town} have {weather} weather.",
        "Expect {weather} weather in {town} on {day}.",
        "{day}'s forecast for {town} is {weather}.",
    ),
    "mood": (
        "{name} is {feeling} about the {thing}.",
        "{name} feels {feeling} because of the {thing}.",
        "The {thing} makes {name} {feeling}.",
        "Because of the {thing}, {name} became {feeling}.",
        "The {thing} is why {name} feels {feeling}.",
        "{name} was made {feeling} by the {thing}.",
    ),
    "price": (
        "The {thing} costs {number} dollars.",
        "You pay {number} dollars for the {thing}.",
        "The price of the {thing} is {number} dollars.",
        "{number} dollars is what the {thing} costs.",
        "For {number} dollars you can buy the {thing}.",
        "The {thing} is sold for {number} dollars.",
    ),
    "meal": (
        "{name} eats {food} on {day}.",
        "On {day} {name} has {food} for dinner.",
        "{name}'s meal on {day} is {food}.",
        "{food} is what {name} eats on {day}.",
        "For dinner on {day}, {name} is having {food}.",
        "{day} is the day that {name} eats {food}.",
    ),
    "meeting": (
        "The meeting with {name} is at {number} on {day}.",
        "{name} meets us on {day} at {number}.",
        "On {day} at {number} we have a meeting with {name}.",
        "We see {name} on {day} at {number} o'clock.",
        "Our appointment with {name} is on {day} at {number}.",
        "At {number} this {day} we will meet {name}.",
    ),
    "lost": (
        "{name} lost a {colour} {thing}.",
        "A {colour} {thing} was lost by {name}.",
        "{name} cannot find the {colour} {thing}.",
        "The {colour} {thing} of {name} is missing.",
        "{name} is looking for a {colour} {thing} that is gone.",
        "Has anyone found {name}'s {colour} {thing}?",
    ),
    "learn": (
        "{name} wants to learn to be a {job}.",
        "{name} would like to become a {job}.",
        "To be a {job} is what {name} wants.",
        "{name} hopes to work as a {job} one day.",
        "{name} dreams of being a {job}.",
        "The wish of {name} is to become a {job}.",
    ),
    "house": (
        "{name} lives in a {size} house in {town}.",
        "The house of {name} in {town} is {size}.",
        "{name}'s home in {town} is {size}.",
        "In {town}, {name} has a {size} home.",
        "A {size} house in {town} is where {name} lives.",
        "{name} owns a house in {town} that is {size}.",
    ),
    "broken": (
        "The {thing} of {name} is broken.",
        "{name}'s {thing} does not work.",
        "{name} has a broken {thing}.",
        "{name} needs to repair the {thing}.",
        "The {thing} that {name} owns stopped working.",
        "Something is wrong with {name}'s {thing}.",
    ),
    "lend": (
        "{name} gave the {thing} to the {job}.",
        "The {job} got the {thing} from {name}.",
        "{name} handed the {job} the {thing}.",
        "The {thing} was given to the {job} by {name}.",
        "It was {name} who gave the {job} a {thing}.",
        "The {job} received the {thing} from {name}.",
    ),
    "cook": (
        "How do I cook {food} for {number} people?",
        "What is a recipe of {food} for {number}?",
        "Tell me how to make {food} for {number} people.",
        "I want to prepare {food} for {number} guests.",
        "How can {food} be made for {number} persons?",
        "Please explain how {food} for {number} guests is cooked.",
    ),
    "route": (
        "How do I get from {town} to the {animal} farm?",
        "What is the way to the {animal} farm from {town}?",
        "Show me the road from {town} to the {animal} farm.",
        "Which road goes from {town} to the {animal} farm?",
        "I am in {town} and need to find the {animal} farm.",
        "Tell me how to reach the {animal} farm from {town}.",
    ),
    "sell": (
        "{name} sells a {size} {thing}.",
        "A {size} {thing} is for sale by {name}.",
        "{name} offers a {thing} that is {size}.",
        "You can buy a {size} {thing} from {name}.",
        "{name} wants to sell a {thing}; it is {size}.",
        "For sale from {name}: a {size} {thing}.",
    ),
    "work": (
        "{name} works {number} hours on {day}.",
        "On {day} {name} has {number} hours of work.",
        "{name}'s work on {day} takes {number} hours.",
        "{day} is a day of {number} working hours for {name}.",
        "{name} is busy for {number} hours this {day}.",
        "For {number} hours on {day}, {name} has to work.",
    ),
    "animal": (
        "The {animal} is {feeling} and wants {food}.",
        "The {feeling} {animal} would like some {food}.",
        "The {animal} feels {feeling}; give it {food}.",
        "{food} is what the {feeling} {animal} wants.",
        "Give some {food} to the {animal}, for it is {feeling}.",
        "A {animal} that is {feeling} needs {food}.",
    ),
}


@dataclass(frozen=True)
class Meaning:
    topic: str
    senses: tuple[tuple[str, int], ...]
    """Each slot and the number of its sense."""

    @property
    def held_out(self) -> bool:
        return hashlib.sha256(repr(self).encode()).digest()[0] < 25

    def say(self, rng: Random, way: int) -> str:
        filled = {slot: rng.choice(SLOTS[slot][sense]) for slot, sense in self.senses}
        text = TOPICS[self.topic][way].format(**filled)
        return text[0].upper() + text[1:]


def meaning(rng: Random, topic: str, held_out: bool = False, near: Meaning | None = None) -> Meaning:
    """One of the training part, or of the one in ten that is held out. near: with all but one of that one's senses."""
    named = sorted(slot for slot in SLOTS if f"{{{slot}}}" in TOPICS[topic][0])
    while True:
        senses = dict(near.senses) if near else {}
        for slot in [rng.choice(named)] if near else named:
            senses[slot] = rng.randrange(len(SLOTS[slot]))
        found = Meaning(topic, tuple(senses.items()))
        if found.held_out == held_out:
            return found


def batch(rng: Random, count: int) -> list[tuple[str, str]]:
    """So many pairs of two topics, each of a meaning of its own, said in two ways. Half of the meanings differ from
    another one by one word's sense: what is only of the same topic is not yet the same."""
    topics, found = rng.sample(list(TOPICS), 2), dict[Meaning, tuple[str, str]]()
    while len(found) < count:
        topic = rng.choice(topics)
        others = [m for m in found if m.topic == topic]
        near = rng.choice(others) if others and rng.random() < 0.5 else None
        found.setdefault(said := meaning(rng, topic, near=near), _two(rng, said, held_out=False))
    return list(found.values())


def held_out_pairs(count: int, seed: int) -> list[tuple[str, str]]:
    """So many pairs of different meanings, of all topics, said in ways that training has never seen."""
    rng, found = Random(f"{seed} held out"), dict[Meaning, tuple[str, str]]()
    while len(found) < count:
        said = meaning(rng, rng.choice(list(TOPICS)), held_out=True)
        found.setdefault(said, _two(rng, said, held_out=True))
    return list(found.values())


def _two(rng: Random, said: Meaning, held_out: bool) -> tuple[str, str]:
    ways = range(len(TOPICS[said.topic]))
    first, second = rng.sample(ways[-HELD_OUT_WAYS:] if held_out else ways[:-HELD_OUT_WAYS], 2)
    return said.say(rng, first), said.say(rng, second)
