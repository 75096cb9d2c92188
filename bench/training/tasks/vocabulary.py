"""The words that questions are filled with. Data only."""

from bench.training.tasks.base import words
from bench.training.tasks.facts import CAPITALS, OPPOSITES, PAST, PLURALS

NAMES = words(
    "Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Mia Noah Olga Paul Quinn Rosa Sam Tina Uma Victor "
    "Wendy Xenia Yusuf Zoe Alice Bob Carol Dan Eva Frank Gina Hugo Iris Jonas Karl Lena Max Nina Oscar Petra Ralf Sara "
    "Tom Ursula Vera Will Yara Zara Amir Bella Chen Diego Elif Farah Goran Hana Ivan Jamal Kofi Luca Maria Nadia Omar"
)
JOBS = words(
    "teacher doctor baker farmer pilot nurse painter writer singer lawyer cook driver engineer gardener dentist "
    "plumber carpenter librarian journalist scientist"
)
TOWNS = [city for city in CAPITALS.values() if " " not in city]
ITEMS = words(
    "apple pear plum cherry banana lemon orange grape melon peach book pen pencil cup plate spoon fork knife chair "
    "table lamp ball hat coat shirt shoe sock key coin stone leaf flower box bag bottle candle clock mirror phone card"
)
COLOUR_NAMES = words("red blue green yellow black white brown pink grey purple orange")
ANIMALS = words(
    "cat dog fox bear rabbit mouse owl frog duck horse lion turtle penguin squirrel hedgehog elephant goat donkey crow "
    "otter wolf swan pig deer"
)
PLACES = ("forest", "garden", "village", "river", "mountain", "old barn", "meadow", "lake", "harbour")
FOUND = ("golden key", "small lantern", "blue stone", "lost letter", "silver bell", "wooden boat", "red kite")
_COMMON = words(
    "able acid area army away baby back ball band bank base bath bean bell best bike bird blow boat body bone boot "
    "born boss both bowl burn bush cake calm camp care case cash cave chat chin city clay club cold cook cool corn "
    "cost crew crop dark data date dawn desk diet dish door dust each earth east edge else even ever face fact fair "
    "fall farm fate fear feed field fight fill film fine fire fish five flag floor flow food form four free fruit "
    "game gate gift girl glad goal gold grand grass gray great green group grow hair half hall hammer head heat help "
    "hill hole home hope hour idea iron island jazz join jump just king kiss kite lady land lane large laugh lead "
    "lift like line link list lock long look lord luck main many map mark mask meal meat milk mind mine mint mix "
    "moon more most move much music nail name neck need nest news next nice nine noise north nose note ocean oil "
    "once only oven over pack page pain pair park part party path peace pick piece pipe plan plant play plus poem "
    "pool port post pure queen quick race rain rest rice ride ring rise river road rock roof room root rope rose "
    "rule sail salt sand save seat seed ship shop show side sign silk six size skin sky snow soap song soon soup "
    "south space star stay step stop store storm such suit sun table tail tale tall team tent test text then time "
    "tiny tool tour town toy tree trip tube turn twin unit upon vase vast verb very view voice wall want warm wash "
    "wave west wheel wild wind wine wing wire wise wood wool word world yard year yes young zero zone"
)
WORDS = sorted(
    {*_COMMON, *ITEMS, *COLOUR_NAMES, *ANIMALS, *OPPOSITES, *OPPOSITES.values(), *PLURALS, *PAST, *PAST.values(), *JOBS}
)
