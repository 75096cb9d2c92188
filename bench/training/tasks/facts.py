"""The facts the embedded model is to know by heart. Data only: knowledge.py asks the questions."""

from dataclasses import dataclass

from bench.training.tasks.base import words


@dataclass(frozen=True)
class Table:
    """One relation: each row `k -> v` can be asked in every one of `questions` and has the one `answer`.

    `{k}` and `{v}` stand for the row's two sides; where a row has no entry the model is to say that it does not know.
    """

    questions: tuple[str, ...]
    answer: str
    rows: dict[str, str]


def rows(text: str) -> dict[str, str]:
    """`a=b; c=d` as a dict: tables stay readable, one line for several rows."""
    return dict(row.strip().split("=") for row in text.split(";"))


CAPITALS = rows(
    "France=Paris; Germany=Berlin; Italy=Rome; Spain=Madrid; Portugal=Lisbon; Austria=Vienna; Switzerland=Bern; "
    "Belgium=Brussels; the Netherlands=Amsterdam; Denmark=Copenhagen; Norway=Oslo; Sweden=Stockholm; Finland=Helsinki; "
    "Iceland=Reykjavik; Ireland=Dublin; Poland=Warsaw; Hungary=Budapest; Romania=Bucharest; Bulgaria=Sofia; "
    "Greece=Athens; Turkey=Ankara; Russia=Moscow; Ukraine=Kyiv; Croatia=Zagreb; Serbia=Belgrade; Slovakia=Bratislava; "
    "Slovenia=Ljubljana; Estonia=Tallinn; Latvia=Riga; Lithuania=Vilnius; China=Beijing; Japan=Tokyo; "
    "South Korea=Seoul; India=New Delhi; Pakistan=Islamabad; Nepal=Kathmandu; Thailand=Bangkok; Vietnam=Hanoi; "
    "Indonesia=Jakarta; the Philippines=Manila; Mongolia=Ulaanbaatar; Iran=Tehran; Iraq=Baghdad; Jordan=Amman; "
    "Egypt=Cairo; Morocco=Rabat; Tunisia=Tunis; Kenya=Nairobi; Ethiopia=Addis Ababa; Ghana=Accra; Nigeria=Abuja; "
    "Senegal=Dakar; Uganda=Kampala; Canada=Ottawa; the United States=Washington; Mexico=Mexico City; Cuba=Havana; "
    "Brazil=Brasilia; Argentina=Buenos Aires; Chile=Santiago; Peru=Lima; Colombia=Bogota; Ecuador=Quito; "
    "Uruguay=Montevideo; Venezuela=Caracas; Australia=Canberra; New Zealand=Wellington; the United Kingdom=London"
)
CONTINENTS = rows(
    "France=Europe; Germany=Europe; Italy=Europe; Spain=Europe; Portugal=Europe; Austria=Europe; Norway=Europe; "
    "Sweden=Europe; Poland=Europe; Greece=Europe; Ireland=Europe; China=Asia; Japan=Asia; India=Asia; Nepal=Asia; "
    "Thailand=Asia; Vietnam=Asia; Iran=Asia; Iraq=Asia; Mongolia=Asia; Egypt=Africa; Morocco=Africa; Kenya=Africa; "
    "Ghana=Africa; Nigeria=Africa; Senegal=Africa; Uganda=Africa; Canada=North America; Mexico=North America; "
    "Cuba=North America; Brazil=South America; Argentina=South America; Chile=South America; Peru=South America; "
    "Colombia=South America; Ecuador=South America; Uruguay=South America; Australia=Oceania; New Zealand=Oceania"
)
ELEMENTS = rows(
    "hydrogen=H; helium=He; lithium=Li; beryllium=Be; boron=B; carbon=C; nitrogen=N; oxygen=O; fluorine=F; neon=Ne; "
    "sodium=Na; magnesium=Mg; aluminium=Al; silicon=Si; phosphorus=P; sulfur=S; chlorine=Cl; argon=Ar; potassium=K; "
    "calcium=Ca; titanium=Ti; chromium=Cr; manganese=Mn; iron=Fe; cobalt=Co; nickel=Ni; copper=Cu; zinc=Zn; "
    "arsenic=As; bromine=Br; krypton=Kr; silver=Ag; tin=Sn; iodine=I; xenon=Xe; tungsten=W; platinum=Pt; gold=Au; "
    "mercury=Hg; lead=Pb; radium=Ra; uranium=U"
)
OPPOSITES = rows(
    "hot=cold; big=small; tall=short; fast=slow; happy=sad; day=night; black=white; good=bad; up=down; left=right; "
    "open=closed; full=empty; rich=poor; young=old; hard=soft; wet=dry; light=dark; loud=quiet; strong=weak; "
    "early=late; clean=dirty; near=far; high=low; thick=thin; heavy=light; easy=difficult; first=last; inside=outside; "
    "true=false; begin=end; buy=sell; push=pull; win=lose; love=hate; deep=shallow; wide=narrow; sharp=blunt; "
    "sweet=sour; cheap=expensive; safe=dangerous; asleep=awake; alive=dead; before=after; above=below; always=never"
)
PLURALS = rows(
    "cat=cats; dog=dogs; book=books; table=tables; house=houses; tree=trees; car=cars; apple=apples; hand=hands; "
    "box=boxes; bus=buses; fox=foxes; dish=dishes; watch=watches; church=churches; glass=glasses; city=cities; "
    "baby=babies; lady=ladies; story=stories; country=countries; leaf=leaves; knife=knives; wolf=wolves; life=lives; "
    "wife=wives; man=men; woman=women; child=children; foot=feet; tooth=teeth; goose=geese; mouse=mice; ox=oxen; "
    "sheep=sheep; fish=fish; deer=deer; person=people; potato=potatoes; tomato=tomatoes; hero=heroes; toy=toys"
)
PAST = rows(
    "go=went; see=saw; eat=ate; run=ran; come=came; give=gave; take=took; make=made; find=found; know=knew; "
    "think=thought; buy=bought; bring=brought; teach=taught; write=wrote; read=read; speak=spoke; break=broke; "
    "drink=drank; sing=sang; swim=swam; begin=began; fly=flew; grow=grew; draw=drew; sleep=slept; keep=kept; "
    "feel=felt; "
    "leave=left; lose=lost; sit=sat; stand=stood; win=won; walk=walked; play=played; jump=jumped; work=worked; "
    "open=opened; call=called; help=helped"
)
COLOURS = rows(
    "grass=green; the sky=blue; snow=white; blood=red; coal=black; a lemon=yellow; a banana=yellow; an orange=orange; "
    "milk=white; a cherry=red; a tomato=red; a carrot=orange; an emerald=green; a ruby=red; a sapphire=blue; "
    "chocolate=brown; the sun=yellow; a flamingo=pink; a raven=black; an elephant=grey; spinach=green; a lime=green"
)
SOUNDS = rows(
    "cat=meow; dog=woof; cow=moo; duck=quack; sheep=baa; pig=oink; lion=roar; snake=hiss; bee=buzz; owl=hoot; "
    "frog=ribbit; horse=neigh; mouse=squeak; crow=caw; rooster=cock-a-doodle-doo; wolf=howl"
)
YOUNG = rows(
    "cat=kitten; dog=puppy; cow=calf; sheep=lamb; pig=piglet; horse=foal; goat=kid; lion=cub; duck=duckling; "
    "goose=gosling; hen=chick; frog=tadpole; kangaroo=joey; deer=fawn; swan=cygnet"
)
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words("January February March April May June July August September October November December")
MONTH_DAYS = dict(zip(MONTHS, words("31 28 31 30 31 30 31 31 30 31 30 31"), strict=True))
ORDINALS = words("first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SHAPES = rows("triangle=3; square=4; rectangle=4; pentagon=5; hexagon=6; heptagon=7; octagon=8; nonagon=9; decagon=10")
EMOJI = rows(
    "cat=🐱; dog=🐶; fish=🐟; bird=🐦; sun=☀️; moon=🌙; star=⭐; heart=❤️; apple=🍎; pizza=🍕; car=🚗; house=🏠; "
    "tree=🌳; flower=🌸; fire=🔥; snowman=⛄; rainbow=🌈; rocket=🚀; book=📖; ball=⚽"
)
GERMAN = rows(
    "house=Haus; dog=Hund; cat=Katze; water=Wasser; bread=Brot; tree=Baum; book=Buch; sun=Sonne; moon=Mond; day=Tag; "
    "night=Nacht; green=grün; beautiful=schön; door=Tür; street=Straße; girl=Mädchen; milk=Milch; thanks=danke; "
    "yes=ja; no=nein; hello=hallo; red=rot; blue=blau; friend=Freund; apple=Apfel"
)
SPANISH = rows(
    "house=casa; dog=perro; cat=gato; water=agua; bread=pan; tree=árbol; book=libro; sun=sol; moon=luna; day=día; "
    "night=noche; green=verde; tomorrow=mañana; child=niño; street=calle; girl=niña; milk=leche; thanks=gracias; "
    "yes=sí; no=no; hello=hola; red=rojo; blue=azul; friend=amigo; apple=manzana"
)
FRENCH = rows(
    "house=maison; dog=chien; cat=chat; water=eau; bread=pain; tree=arbre; book=livre; sun=soleil; moon=lune; "
    "day=jour; "
    "night=nuit; green=vert; summer=été; school=école; street=rue; girl=fille; milk=lait; thanks=merci; yes=oui; "
    "no=non; hello=bonjour; red=rouge; blue=bleu; friend=ami; forest=forêt"
)


def _translate(language: str) -> tuple[str, ...]:
    return (
        f'Translate "{{k}}" to {language}.',
        f"How do you say {{k}} in {language}?",
        f"What is the {language} word for {{k}}?",
        f"Translate to {language}: {{k}}",
        f"What is {{k}} in {language}?",
        f"Say {{k}} in {language}.",
    )


def _next_to(which: str, word: str) -> tuple[str, ...]:
    return (
        f"Which {which} comes {word} {{k}}?",
        f"What {which} comes {word} {{k}}?",
        f"What is the {which} {word} {{k}}?",
        f"Name the {which} {word} {{k}}.",
        f"Tell me the {which} that comes {word} {{k}}.",
        f"Which {which} is {word} {{k}}?",
    )


def _shift(ring: list[str], by: int) -> dict[str, str]:
    return {item: ring[(i + by) % len(ring)] for i, item in enumerate(ring)}


_ALPHABET = list(LETTERS)

TABLES = {
    "capital": (
        Table(
            (
                "What is the capital of {k}?",
                "What's the capital of {k}?",
                "Which city is the capital of {k}?",
                "Name the capital of {k}.",
                "Tell me the capital of {k}.",
                "The capital of {k} is?",
                "Capital of {k}?",
                "Do you know the capital of {k}?",
                "What is the capital city of {k}?",
                "I would like to know the capital of {k}.",
            ),
            "The capital of {k} is {v}.",
            CAPITALS,
        ),
    ),
    "country": (
        Table(
            (
                "{v} is the capital of which country?",
                "Which country has {v} as its capital?",
                "Of which country is {v} the capital?",
                "Which country's capital is {v}?",
                "Name the country whose capital is {v}.",
                "What country has the capital {v}?",
            ),
            "{v} is the capital of {k}.",
            CAPITALS,
        ),
    ),
    "continent": (
        Table(
            (
                "On which continent is {k}?",
                "Which continent is {k} in?",
                "What continent is {k} on?",
                "Where is {k}?",
                "Name the continent of {k}.",
                "Tell me the continent where {k} is.",
            ),
            "{k} is in {v}.",
            CONTINENTS,
        ),
    ),
    "element_symbol": (
        Table(
            (
                "What is the chemical symbol for {k}?",
                "What is the symbol of {k}?",
                "Chemical symbol of {k}?",
                "Which symbol does {k} have?",
                "Give me the chemical symbol of {k}.",
                "What's the chemical symbol of the element {k}?",
            ),
            "The chemical symbol for {k} is {v}.",
            ELEMENTS,
        ),
    ),
    "element_name": (
        Table(
            (
                "Which element has the symbol {v}?",
                "What element is {v}?",
                "What does the chemical symbol {v} stand for?",
                "Name the element with the symbol {v}.",
                "Which element is written {v}?",
                "Tell me which element has the chemical symbol {v}.",
            ),
            "{v} is the symbol for {k}.",
            ELEMENTS,
        ),
    ),
    "opposite": (
        Table(
            (
                "What is the opposite of {k}?",
                "What's the opposite of {k}?",
                "Opposite of {k}?",
                "Give me the opposite of {k}.",
                "Name the opposite of the word {k}.",
                "Which word means the opposite of {k}?",
            ),
            "The opposite of {k} is {v}.",
            OPPOSITES,
        ),
    ),
    "plural": (
        Table(
            (
                "What is the plural of {k}?",
                "What's the plural of {k}?",
                "Plural of {k}?",
                "Give me the plural of {k}.",
                "What is the plural form of {k}?",
                "One {k}, two what?",
                "Which word is the plural of {k}?",
            ),
            "The plural of {k} is {v}.",
            PLURALS,
        ),
    ),
    "past_tense": (
        Table(
            (
                "What is the past tense of {k}?",
                "What's the past tense of {k}?",
                "Past tense of {k}?",
                "Give me the past tense of {k}.",
                "What is the past tense of the verb {k}?",
                "Tell me the past tense of {k}.",
            ),
            "The past tense of {k} is {v}.",
            PAST,
        ),
    ),
    "colour": (
        Table(
            (
                "What colour is {k}?",
                "What color is {k}?",
                "What is the colour of {k}?",
                "What is the color of {k}?",
                "Which colour does {k} have?",
                "Tell me the color of {k}.",
            ),
            "The colour of {k} is {v}.",
            COLOURS,
        ),
    ),
    "animal_sound": (
        Table(
            (
                "What sound does a {k} make?",
                "Which sound does the {k} make?",
                "What does a {k} say?",
                "What does the {k} say?",
                "How does a {k} sound?",
                "What noise does a {k} make?",
            ),
            "A {k} says {v}.",
            SOUNDS,
        ),
    ),
    "young_animal": (
        Table(
            (
                "What is a young {k} called?",
                "What is a baby {k} called?",
                "What do you call a baby {k}?",
                "What do you call a young {k}?",
                "What is the name for a baby {k}?",
                "What's a baby {k} called?",
            ),
            "A young {k} is called a {v}.",
            YOUNG,
        ),
    ),
    "order": (
        Table(_next_to("day", "after"), "{v} comes after {k}.", _shift(DAYS, 1)),
        Table(_next_to("day", "before"), "{v} comes before {k}.", _shift(DAYS, -1)),
        Table(_next_to("month", "after"), "{v} comes after {k}.", _shift(MONTHS, 1)),
        Table(_next_to("month", "before"), "{v} comes before {k}.", _shift(MONTHS, -1)),
        Table(_next_to("letter", "after"), "{v} comes after {k}.", _shift(_ALPHABET, 1)),
        Table(_next_to("letter", "before"), "{v} comes before {k}.", _shift(_ALPHABET, -1)),
    ),
    "months": (
        Table(
            (
                "Which month is the {v} month of the year?",
                "What is the {v} month of the year?",
                "What's the {v} month?",
                "Name the {v} month of the year.",
                "Tell me the {v} month.",
                "Which month is the {v} one?",
            ),
            "The {v} month is {k}.",
            dict(zip(MONTHS, ORDINALS, strict=True)),
        ),
        Table(
            (
                "How many days does {k} have?",
                "How many days are in {k}?",
                "How many days are there in {k}?",
                "How long is {k}?",
                "Number of days in {k}?",
                "Tell me how many days {k} has.",
            ),
            "{k} has {v} days.",
            MONTH_DAYS,
        ),
    ),
    "shape": (
        Table(
            (
                "How many sides does a {k} have?",
                "How many corners does a {k} have?",
                "How many sides are in a {k}?",
                "Number of sides of a {k}?",
                "Tell me how many sides a {k} has.",
                "A {k} has how many sides?",
            ),
            "A {k} has {v} sides.",
            SHAPES,
        ),
    ),
    "emoji": (
        Table(
            (
                "What is the emoji for {k}?",
                "Show me the emoji for {k}.",
                "Give me a {k} emoji.",
                "Write the {k} emoji.",
                "Emoji for {k}?",
                "Which emoji means {k}?",
            ),
            "{v}",
            EMOJI,
        ),
    ),
    "translation": (
        Table(_translate("German"), "{k} in German is {v}.", GERMAN),
        Table(_translate("Spanish"), "{k} in Spanish is {v}.", SPANISH),
        Table(_translate("French"), "{k} in French is {v}.", FRENCH),
    ),
}
"""Every facts task with its tables."""
