"""MLServer: a runtime for each work, named in model-settings.json."""

import work
from mlserver import MLModel
from mlserver.codecs import Base64Codec, NumpyCodec, StringCodec
from mlserver.types import InferenceResponse


class AddSub(MLModel):
    async def predict(self, payload):
        outputs = work.add_sub(*(NumpyCodec.decode_input(each) for each in payload.inputs))
        encoded = [NumpyCodec.encode_output(f"OUTPUT{at}", each) for at, each in enumerate(outputs)]
        return InferenceResponse(model_name=self.name, outputs=encoded)


class Means(MLModel):
    async def predict(self, payload):
        output = work.means(Base64Codec.decode_input(payload.inputs[0])[0])
        encoded = NumpyCodec.encode_output("MEANS", output)
        return InferenceResponse(model_name=self.name, outputs=[encoded])


class Tokens(MLModel):
    async def predict_stream(self, payloads):
        async for payload in payloads:
            for token in work.tokens(StringCodec.decode_input(payload.inputs[0])[0]):
                output = StringCodec.encode_output("text_output", [token])
                yield InferenceResponse(model_name=self.name, outputs=[output])
