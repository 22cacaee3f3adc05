"""The table of routes agrees with itself."""

from attend.service.contract.routes import COUNTED, ROUTES, TAGS


def test_a_call_that_waits_in_the_queue_counts():
    queued = [route for route in ROUTES if route.is_queued]
    assert len(queued) >= 6
    assert [route.path for route in queued if route.path not in COUNTED["http"]] == []


def test_each_route_has_a_place_of_its_own_and_a_tag_that_is_described():
    assert len({(route.method, route.path) for route in ROUTES}) == len(ROUTES)
    assert {route.tag for route in ROUTES} == TAGS.keys()
