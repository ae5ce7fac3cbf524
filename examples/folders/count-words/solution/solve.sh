#!/bin/sh
set -e
cat > /workspace/count.c <<'END'
#include <stdio.h>

/* Counts lines, words and bytes of standard input. */

static int is_space(int byte)
{
    return byte == ' ' || (byte >= '\t' && byte <= '\r');
}

int main(void)
{
    unsigned long long lines = 0, words = 0, bytes = 0;
    int byte, in_word = 0;

    while ((byte = getchar()) != EOF) {
        bytes++;
        lines += byte == '\n';
        words += !is_space(byte) && !in_word;
        in_word = !is_space(byte);
    }
    printf("%llu %llu %llu\n", lines, words, bytes);
    return 0;
}
END
make -C /workspace
