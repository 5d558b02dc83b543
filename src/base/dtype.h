/* SPDX-License-Identifier: Apache-2.0 */
/* Sizes and names of element types, names of reduction operators. */
#ifndef BASE_DTYPE_H
#define BASE_DTYPE_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"

enum { BASE_NUM_DTYPES = 17, BASE_NUM_REDOPS = 9 };

/* Bytes of an element; 0 if the type is unknown. */
size_t base_dtype_size(enum hdl_dtype dtype);
/* "f32"; "unknown" if it is. */
const char *base_dtype_name(enum hdl_dtype dtype);

/* "sum"; "unknown" if it is. */
const char *base_redop_name(enum hdl_redop redop);

#endif
