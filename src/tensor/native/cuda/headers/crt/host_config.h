// Empty replacement of the CUDA toolkit's file of this name, which the torch wheel lacks: checks of the host compiler.
#pragma once
