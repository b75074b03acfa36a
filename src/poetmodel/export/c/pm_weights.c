/* The file of weights as bytes that stay in flash: no array of C, which would be many times its size. */
extern const unsigned char pm_weights[];

__asm__(".pushsection .rodata.pm_weights, \"a\"\n"
        ".balign 16\n"
        ".global pm_weights\n"
        "pm_weights:\n"
        ".incbin \"weights.bin\"\n"
        ".balign 16\n"
        ".popsection\n");
