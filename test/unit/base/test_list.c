/* SPDX-License-Identifier: Apache-2.0 */
/* The intrusive list. */
#include "unit.h"

#include "base/list.h"

struct item {
    int value;
    struct base_list node;
};

static int sum_of(struct base_list *head, int factor)
{
    int sum = 0;
    base_list_each(node, after, head) sum =
        sum * factor + base_container_of(node, struct item, node)->value;
    return sum;
}

static void test_order(void **state)
{
    struct base_list head;
    struct item items[3] = {{.value = 1}, {.value = 2}, {.value = 3}};
    base_list_init(&head);
    assert_true(base_list_empty(&head));
    assert_null(base_list_first(&head));
    assert_null(base_list_pop_front(&head));
    base_list_push_back(&head, &items[1].node);
    base_list_push_back(&head, &items[2].node);
    base_list_push_front(&head, &items[0].node);
    assert_int_equal(sum_of(&head, 10), 123);
    base_list_remove(&items[1].node);
    base_list_remove(&items[1].node);
    assert_int_equal(sum_of(&head, 10), 13);
    assert_ptr_equal(base_list_pop_front(&head), &items[0].node);
    assert_int_equal(sum_of(&head, 10), 3);
}

static void test_remove_while_visiting(void **state)
{
    struct base_list head;
    struct item items[5];
    base_list_init(&head);
    for (int i = 0; i < 5; i++) {
        items[i].value = i;
        base_list_push_back(&head, &items[i].node);
    }
    base_list_each(node, after, &head)
    {
        if (base_container_of(node, struct item, node)->value % 2 == 0)
            base_list_remove(node);
    }
    assert_int_equal(sum_of(&head, 10), 13);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_remove_while_visiting),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
