"""A mutant reaches the functions of a module that is imported, and no other module's."""

from types import ModuleType

from tests.mutation.plugin import replaced

SOURCE = """
class Counter:
    def __init__(self, start):
        self.count = start

    def up(self):
        self.count += 1
        return self.count


def adder(more):
    def add(number):
        return number + more
    return add


add = adder(3)
"""


def imported(source: str, file: str) -> ModuleType:
    module = ModuleType("imported")
    exec(compile(source, file, "exec"), vars(module))
    return module


def test_methods_and_closures_that_live_already_have_the_new_code():
    module, other = imported(SOURCE, "a.py"), imported(SOURCE, "b.py")
    counter = module.Counter(5)
    assert replaced("a.py", SOURCE, SOURCE.replace("+= 1", "-= 1").replace("number + more", "(number - more)"))
    assert (counter.up(), module.add(1), module.adder(4)(1)) == (4, -2, -3)
    assert (other.Counter(5).up(), other.add(1)) == (6, 4)


def test_what_cannot_be_given_to_a_living_function_is_said():
    module = imported(SOURCE, "c.py")
    assert not replaced("c.py", SOURCE, SOURCE.replace("return number + more", "pass"))  # closes over nothing
    assert not replaced("c.py", SOURCE, SOURCE.replace("def up", "def down"))
    assert not replaced("d.py", SOURCE, SOURCE)
    assert module.add(1) == 4
