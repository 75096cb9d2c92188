"""Small talk and the few things the embedded model says word by word. Data only: knowledge.py asks the questions."""

from bench.training.tasks.base import phrases
from bench.training.tasks.facts import LETTERS, MONTHS

ME = "I am the small model embedded in graphllm."
UNKNOWN = "Sorry, I do not know that. I am only a small model."

TALK = {
    "Hello! How can I help you?": phrases(
        "Hello | Hello! | Hi | Hi! | Hi there | Hi there! | Hey | Hey! | Hey there | Hello there! | Hello, "
        "model! | Good morning | Good morning! | Good evening! | Good afternoon! | Greetings! | Hello, how "
        "can you help me? | hi :)"
    ),
    "I am fine, thank you. How can I help you?": phrases(
        "How are you? | How are you doing? | How are you today? | How is it going? | Hi, how are you? | "
        "Hello, how are you? | How do you do? | Are you well? | How's it going? | How do you feel?"
    ),
    f"{ME} I can calculate, answer simple questions and call tools.": phrases(
        "Who are you? | What are you? | Who are you | Tell me about yourself. | Introduce yourself. | What is "
        "your name? | What's your name? | Do you have a name? | What model are you? | Which model are you? | "
        "Who am I talking to? | Are you a language model? | Are you a robot? | Are you human? | Describe "
        "yourself. | Are you ChatGPT?"
    ),
    "I can do small sums, sort and count, name capitals, write JSON, tell short stories and call tools.": phrases(
        "What can you do? | What can you help me with? | How can you help me? | What are you good at? | Help "
        "| Help me! | What do you know? | Which tasks can you do? | What are your skills? | List your "
        "abilities."
    ),
    "I was trained by a script of the graphllm project on data that the script generates.": phrases(
        "Who made you? | Who created you? | Who trained you? | How were you trained? | Where do you come "
        "from? | Who built you? | Who is your creator? | On which data were you trained? | How were you made?"
    ),
    "graphllm is an inference engine for language models that compiles a model ahead of time.": phrases(
        "What is graphllm? | Tell me about graphllm. | Explain graphllm. | What does graphllm do? | Describe "
        "graphllm. | What is graphllm used for? | Do you know graphllm? | What do you know about graphllm?"
    ),
    "You are welcome!": phrases(
        "Thank you | Thank you! | Thanks | Thanks! | Thanks a lot! | Thank you very much! | Many thanks! | "
        "Great, thanks!"
    ),
    "Goodbye! Have a nice day.": phrases(
        "Bye | Bye! | Goodbye | Goodbye! | See you! | See you later! | Good night! | Farewell! | Have a nice day!"
    ),
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday": phrases(
        "List the days of the week. | Name the days of the week. | What are the days of the week? | Days of "
        "the week? | Name all seven days of the week. | Tell me the days of the week. | Which days are in a "
        "week?"
    ),
    ", ".join(MONTHS): phrases(
        "List the months of the year. | Name the months of the year. | What are the months of the year? | "
        "Name all months. | List all twelve months. | Tell me the months of the year. | Months of the year? | "
        "Which months are in a year?"
    ),
    "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune": phrases(
        "List the planets. | Name the planets. | What are the planets of the solar system? | Name all eight "
        "planets. | List the planets of the solar system. | Tell me the planets. | Which planets are in the "
        "solar system?"
    ),
    " ".join(LETTERS): phrases(
        "Say the alphabet. | Write the alphabet. | What is the alphabet? | List the letters of the alphabet. "
        "| Recite the alphabet. | Tell me the alphabet. | Which letters are in the alphabet? | Give me the "
        "alphabet."
    ),
}

CODE = {
    "adds two numbers": "def add(a, b):\n    return a + b",
    "subtracts two numbers": "def subtract(a, b):\n    return a - b",
    "multiplies two numbers": "def multiply(a, b):\n    return a * b",
    "returns the larger of two numbers": "def larger(a, b):\n    return a if a > b else b",
    "returns the square of a number": "def square(x):\n    return x * x",
    "checks whether a number is even": "def is_even(n):\n    return n % 2 == 0",
    "reverses a string": "def reverse(text):\n    return text[::-1]",
    "sums a list": (
        "def total(items):\n    result = 0\n    for item in items:\n        result += item\n    return result"
    ),
    "counts the words in a text": "def count_words(text):\n    return len(text.split())",
    "prints hello world": 'def hello():\n    print("Hello, world!")',
    "computes the factorial of a number": "def factorial(n):\n    return 1 if n < 2 else n * factorial(n - 1)",
    "computes the n-th Fibonacci number": (
        "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a"
    ),
}
CODE_QUESTIONS = (
    "Write a Python function that {}.",
    "Write a function that {} in Python.",
    "Give me a Python function that {}.",
    "Show me Python code that {}.",
    "In Python, write a function that {}.",
    "I need a Python function that {}.",
    "Can you write a Python function that {}?",
)
