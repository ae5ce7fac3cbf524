#include <stdio.h>
#include <string.h>

/* Counts lines, words and bytes of standard input. */

int main(void)
{
    char line[80];
    int lines, words = 0, bytes = 0;

    while (fgets(line, sizeof line, stdin)) {
        int i, in_word = 0;
        lines++;
        bytes += strlen(line);
        for (i = 0; i < strlen(line); i++) {
            if (line[i] == ' ' || line[i] == '\n')
                in_word = 0;
            else if (!in_word)
                in_word = 1, words++;
        }
    }
    printf("%d %d %d\n", lines, words, bytes);
}
