// Two networks in one application: each header, each step.
#include "kws.h"
#include "vww.h"

#include <cstdio>

static float image[576];
static int32_t label[4];
static float weight[288];

static_assert(KWS_INPUTS == 2 && VWW_STATES == 6, "both headers are there");

template <typename Step> static int train(std::FILE *file, Step step)
{
    const void *const inputs[KWS_INPUTS] = {image, label};
    float loss = 0;
    if (std::fread(image, sizeof image, 1, file) != 1) return 100;
    if (std::fread(label, sizeof label, 1, file) != 1) return 100;
    const int error = step(inputs, 0.1f, &loss);
    if (!error) std::printf("%.9g\n", static_cast<double>(loss));
    return error;
}

int main(int, char **words)
{
    std::FILE *const file = std::fopen(words[1], "rb");
    int error = kws_init();
    if (!error) error = vww_init();
    for (int k = 0; k < 3 && !error; k++) {
        const long before = std::ftell(file);
        error = train(file, kws_step);
        std::fseek(file, before, SEEK_SET);
        if (!error) error = train(file, vww_step);
    }
    if (!error) error = vww_read_state(VWW_STATE_3_WEIGHT, weight);
    std::printf("%.9g\n", static_cast<double>(weight[0]));
    return error;
}
