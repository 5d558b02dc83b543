/* SPDX-License-Identifier: Apache-2.0 */
/* Runs a fuzz target over every file of a folder: what the fuzzer once found stays found.
 */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int run_file(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (!file)
        return -1;
    uint8_t *data = malloc(1 << 20);
    size_t size = data ? fread(data, 1, 1 << 20, file) : 0;
    fclose(file);
    if (!data)
        return -1;
    /* A block of exactly the input's size, so that ASan sees a read beyond it. */
    uint8_t *exact = realloc(data, size ? size : 1);
    LLVMFuzzerTestOneInput(exact ? exact : data, size);
    free(exact ? exact : data);
    return 0;
}

int main(int argc, char **argv)
{
    DIR *dir = argc > 1 ? opendir(argv[1]) : NULL;
    int count = 0;
    if (!dir) {
        fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
        return 2;
    }
    for (struct dirent *entry = readdir(dir); entry; entry = readdir(dir)) {
        char path[4096];
        if (entry->d_name[0] == '.')
            continue;
        snprintf(path, sizeof(path), "%s/%s", argv[1], entry->d_name);
        if (run_file(path) != 0) {
            fprintf(stderr, "cannot read %s\n", path);
            return 1;
        }
        count++;
    }
    closedir(dir);
    printf("%d inputs\n", count);
    return count == 0;
}
