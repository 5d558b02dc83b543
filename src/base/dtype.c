/* SPDX-License-Identifier: Apache-2.0 */
/* Tables of element types and reduction operators. */
#include "base/dtype.h"

static const struct {
    const char *name;
    size_t size;
} dtypes[BASE_NUM_DTYPES] = {
    [HDL_I8] = {"i8", 1},         [HDL_U8] = {"u8", 1},         [HDL_I16] = {"i16", 2},
    [HDL_U16] = {"u16", 2},       [HDL_I32] = {"i32", 4},       [HDL_U32] = {"u32", 4},
    [HDL_I64] = {"i64", 8},       [HDL_U64] = {"u64", 8},       [HDL_BOOL] = {"bool", 1},
    [HDL_F16] = {"f16", 2},       [HDL_BF16] = {"bf16", 2},     [HDL_F32] = {"f32", 4},
    [HDL_F64] = {"f64", 8},       [HDL_C64] = {"c64", 8},       [HDL_C128] = {"c128", 16},
    [HDL_F8E4M3] = {"f8e4m3", 1}, [HDL_F8E5M2] = {"f8e5m2", 1},
};

static const char *const redops[BASE_NUM_REDOPS] = {
    [HDL_SUM] = "sum", [HDL_AVG] = "avg",   [HDL_PROD] = "prod",
    [HDL_MIN] = "min", [HDL_MAX] = "max",   [HDL_BAND] = "band",
    [HDL_BOR] = "bor", [HDL_BXOR] = "bxor", [HDL_PREMUL_SUM] = "premul_sum",
};

size_t base_dtype_size(enum hdl_dtype dtype)
{
    return (unsigned)dtype < BASE_NUM_DTYPES ? dtypes[dtype].size : 0;
}

const char *base_dtype_name(enum hdl_dtype dtype)
{
    return (unsigned)dtype < BASE_NUM_DTYPES ? dtypes[dtype].name : "unknown";
}

const char *base_redop_name(enum hdl_redop redop)
{
    return (unsigned)redop < BASE_NUM_REDOPS ? redops[redop] : "unknown";
}
