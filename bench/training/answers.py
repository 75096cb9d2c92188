"""What the embedded model's adapters change: the answers of some tasks, in capitals or in German.

An adapter's answer follows from the task's own, so that there is one right answer here, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from bench.training.tasks import Sample, draw
from bench.training.tasks.base import exact
from bench.training.tasks.facts import rows
from bench.training.tasks.sayings import UNKNOWN


@dataclass(frozen=True)
class Manner:
    """How an adapter answers. about: for its card. tasks: by name, how often training draws each. answer: from a task's
    own answer, None where there is none in this manner."""

    about: str
    tasks: dict[str, float]
    answer: Callable[[str], str | None]


def drawn(rng: Random, manner: Manner, task: str, held_out: bool = False) -> Sample:
    """A random sample of a task with the answer that the adapter is to give."""
    while True:
        sample = draw(rng, task, held_out)
        if (answer := manner.answer(sample.answer)) is not None:
            return replace(sample, answer=answer, check=exact)


_COUNTRIES = rows(
    "France=Frankreich; Germany=Deutschland; Italy=Italien; Spain=Spanien; Austria=Österreich; Belgium=Belgien; "
    "Denmark=Dänemark; Norway=Norwegen; Sweden=Schweden; Finland=Finnland; Iceland=Island; Ireland=Irland; "
    "Poland=Polen; Hungary=Ungarn; Romania=Rumänien; Bulgaria=Bulgarien; Greece=Griechenland; Russia=Russland; "
    "Croatia=Kroatien; Serbia=Serbien; Slovenia=Slowenien; Estonia=Estland; Latvia=Lettland; Lithuania=Litauen; "
    "South Korea=Südkorea; India=Indien; Indonesia=Indonesien; Mongolia=Mongolei; Jordan=Jordanien; Egypt=Ägypten; "
    "Morocco=Marokko; Tunisia=Tunesien; Kenya=Kenia; Ethiopia=Äthiopien; Canada=Kanada; Mexico=Mexiko; Cuba=Kuba; "
    "Brazil=Brasilien; Argentina=Argentinien; Colombia=Kolumbien; Australia=Australien; New Zealand=Neuseeland; "
    "Portugal=Portugal; China=China; Japan=Japan; Pakistan=Pakistan; Nepal=Nepal; Thailand=Thailand; "
    "Vietnam=Vietnam; Ghana=Ghana; Nigeria=Nigeria; Senegal=Senegal; Uganda=Uganda; Chile=Chile; Peru=Peru; "
    "Ecuador=Ecuador; Uruguay=Uruguay; Venezuela=Venezuela"
)
_CITIES = rows(
    "Rome=Rom; Lisbon=Lissabon; Vienna=Wien; Brussels=Brüssel; Copenhagen=Kopenhagen; Warsaw=Warschau; "
    "Bucharest=Bukarest; Athens=Athen; Moscow=Moskau; Belgrade=Belgrad; Beijing=Peking; New Delhi=Neu-Delhi; "
    "Kathmandu=Katmandu; Hanoi=Hanoi; Cairo=Kairo; Addis Ababa=Addis Abeba; Mexico City=Mexiko-Stadt; Havana=Havanna"
)
_CONTINENTS = rows(
    "Europe=Europa; Asia=Asien; Africa=Afrika; North America=Nordamerika; South America=Südamerika; Oceania=Ozeanien"
)
_COLOURS = rows(
    "green=grün; blue=blau; white=weiß; red=rot; black=schwarz; yellow=gelb; orange=orange; brown=braun; pink=rosa; "
    "grey=grau"
)
_TIMES = rows(
    "Monday=Montag; Tuesday=Dienstag; Wednesday=Mittwoch; Thursday=Donnerstag; Friday=Freitag; Saturday=Samstag; "
    "Sunday=Sonntag; January=Januar; February=Februar; March=März; April=April; May=Mai; June=Juni; July=Juli; "
    "August=August; September=September; October=Oktober; November=November; December=Dezember"
)
# The model never wrote these letters' bytes, and has no vectors to tell them apart.
_ASCII = str.maketrans({"ä": "ae", "ö": "oe", "ü": "ue", "ß": "ss", "Ä": "Ae", "Ö": "Oe", "Ü": "Ue"})
_SIGNS = {"+": "plus", "-": "minus", "*": "mal", "/": "geteilt durch"}
_N = r"(-?\d+)"
_LARGER = {"larger": "größer", "smaller": "kleiner", "largest": "größte", "smallest": "kleinste"}
_YES = {"": "", "Yes, ": "Ja, ", "No, ": "Nein, "}
# Patterns of the tasks' answers, and what is said in place of a match. KeyError: it has no German answer.
_GERMAN: tuple[tuple[str, Callable[..., str]], ...] = (
    (rf"{_N} ([-+*/]) {_N} = {_N}\.", lambda a, sign, b, c: f"{a} {_SIGNS[sign]} {b} ist {c}."),
    (rf"(Yes, |No, |){_N} is (larger|smaller) than {_N}\.",
     lambda yes, a, k, b: f"{_YES[yes]}{a} ist {_LARGER[k]} als {b}."),
    (rf"{_N} is (odd|even)\.", lambda a, kind: f"{a} ist {'un' * (kind == 'odd')}gerade."),
    (rf"The (largest|smallest) number is {_N}\.", lambda kind, a: f"Die {_LARGER[kind]} Zahl ist {a}."),
    (rf"The double of {_N} is {_N}\.", lambda a, b: f"Das Doppelte von {a} ist {b}."),
    (rf"Half of {_N} is {_N}\.", lambda a, b: f"Die Hälfte von {a} ist {b}."),
    (r"The capital of (.+) is (.+)\.", lambda k, v: f"Die Hauptstadt von {_COUNTRIES[k]} ist {_CITIES.get(v, v)}."),
    (r"(.+) is the capital of (.+)\.", lambda v, k: f"{_CITIES.get(v, v)} ist die Hauptstadt von {_COUNTRIES[k]}."),
    (r"(.+) is in (.+)\.", lambda k, v: f"{_COUNTRIES[k]} liegt in {_CONTINENTS[v]}."),
    (r"The colour of .+ is (.+)\.", lambda v: f"Die Farbe ist {_COLOURS[v]}."),
    (r"(.+) comes (after|before) (.+)\.",
     lambda v, where, k: f"{_TIMES[v]} kommt {'nach' if where == 'after' else 'vor'} {_TIMES[k]}."),
    (r"(.+) has (\d+) days\.", lambda k, v: f"{_TIMES[k]} hat {v} Tage."),
    (re.escape(UNKNOWN), lambda: "Das weiß ich leider nicht. Ich bin nur ein kleines Modell."),
    (re.escape("Hello! How can I help you?"), lambda: "Hallo! Wie kann ich helfen?"),
    (re.escape("I am fine, thank you. How can I help you?"), lambda: "Danke, gut. Wie kann ich helfen?"),
)  # fmt: skip


def german(answer: str) -> str | None:
    """An answer about numbers or facts in German; None for the others."""
    for pattern, said in _GERMAN:
        if found := re.fullmatch(pattern, answer):
            try:
                return said(*found.groups()).translate(_ASCII)
            except KeyError:
                return None
    return None


MANNERS = {
    "capitals": Manner(
        "answers in capital letters",
        {"capital": 4.0, "country": 2.0, "continent": 2.0, "opposite": 2.0, "colour": 1.0, "talk": 2.0, "unknown": 1.0,
         "compare": 1.0},
        str.upper,
    ),
    "german": Manner(
        "answers in German, without umlauts, where numbers and facts are asked for",
        {"capital": 4.0, "country": 2.0, "continent": 2.0, "colour": 1.0, "order": 2.0, "months": 1.0, "talk": 1.0,
         "unknown": 1.0, "add": 2.0, "subtract": 2.0, "multiply": 1.0, "divide": 1.0, "double_or_half": 1.0,
         "compare": 2.0, "parity": 1.0, "extremes": 1.5},
        german,
    ),
}  # fmt: skip
"""By the names of the folders of `graphllm/embedded/adapters`."""
